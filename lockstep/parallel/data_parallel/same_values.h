// Do ranks that should hold the same values still hold them?
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <lockstep/mesh/tensors.h>

namespace lockstep::comm {
class Communicator;
}

namespace lockstep::data_parallel {

// Every so many exchanges of gradients ranks compare what they hold, unless they are told another
// number: rarely enough that it costs less than a thousandth of any training, and often enough that
// what it finds has not cost a day.
inline constexpr std::int64_t kConsistencyCheckInterval = 1000;

// The words of the error: the name of the compared tensors, and the advice where they differ.
struct Compared {
  std::string things;  // "parameters"
  std::string advice;  // whole sentences
};
Compared parameters();

// Compares these tensors between the ranks of a group, which have the same ones: one number of each
// rank travels, and one of each tensor where they differ. Every rank calls it. UsageError, the same
// on all of them, that names a tensor and the ranks whose values are not those of most.
//
// On the CPU a 64-bit hash is compared, which any change of one word changes. On other devices it
// is the sum of all bits as numbers: two changes of which one undoes the other in that sum are not
// seen.
void check_same_values(std::span<const NamedTensor> tensors, comm::Communicator& group,
                       const Compared& what = parameters());

}  // namespace lockstep::data_parallel

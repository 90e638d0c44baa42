// What a rank says about a call before any data of it is used: two ranks whose fingerprints differ
// are not in the same call.
#pragma once

#include <cstdint>
#include <string>

#include <lockstep/comm/types.h>

namespace lockstep::comm {

// Travels in every message; fixed layout, no padding.
struct Fingerprint {
  std::uint64_t sequence = 0;    // number of the call in its group; of the pair for an exchange
  std::uint64_t count = 0;       // elements, all ranks' together where the sizes are even
  std::uint32_t generation = 0;  // of the group
  std::int32_t root = -1;        // of a broadcast; elsewhere the caller's subject
  Operation operation = Operation::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  std::uint16_t tensors = 1;  // in a list; more count as 65535
  std::uint16_t sizes = 0;    // a hash of their lengths, where those must agree

  bool operator==(const Fingerprint&) const = default;

  // "all_reduce #7 (sum of 1024 float32)"
  std::string text() const;
};
static_assert(sizeof(Fingerprint) == 32);

}  // namespace lockstep::comm

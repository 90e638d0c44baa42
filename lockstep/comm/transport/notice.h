// Why a group ended: what the rank that found a fault tells the others, so that all of them throw
// the same error.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/error.h>

namespace lockstep::comm {

struct Notice {
  static constexpr std::size_t kMostBytes = 3072;  // encoded; longer texts are cut

  Fault fault = Fault::aborted;
  int found_by = 0;  // rank that found it
  std::uint64_t sequence = 0;
  std::string operation;
  std::vector<int> ranks;  // at fault
  std::string explanation;

  // `found_by` is who throws it, unless the error names another.
  static Notice from(const CommError& error, int found_by);

  // The error that a rank of `group` throws for it.
  CommError error(const std::string& group, int rank) const;

  std::vector<std::byte> encode() const;
  // From a peer's bytes; anything malformed becomes a plain "aborted".
  static Notice decode(std::span<const std::byte> bytes);
};

}  // namespace lockstep::comm

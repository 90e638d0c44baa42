// Bytes that ranks ask each other for, a bounded part of them at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <lockstep/distributed/rank_messages.h>

namespace lockstep {

// Of a block of bytes that a rank has under a number.
struct BlockStretch {
  std::int64_t block = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct FetchOptions {
  // A rank's bytes on their way at once, about: as many again come.
  std::int64_t bytes_at_once = 64 << 20;
};

// wanted[r] is what this rank asks of rank r, nothing of itself. `held` gives the bytes of one of
// this rank's blocks. `take` is called as bytes come: with the rank, the place of the stretch among
// those asked of it, how many of its bytes came before, and these. Every rank calls it; only what
// is asked for is sent.
void fetch_stretches(const RankMessages& ranks,
                     const std::vector<std::vector<BlockStretch>>& wanted,
                     const std::function<std::span<const std::byte>(std::int64_t block)>& held,
                     const std::function<void(int rank, std::size_t index, std::int64_t before,
                                              std::span<const std::byte> bytes)>& take,
                     const FetchOptions& options = {});

}  // namespace lockstep

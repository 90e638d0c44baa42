#include <lockstep/optim/parallel_blocks.h>

#include <algorithm>
#include <vector>

#include <lockstep/device/parallel_pieces.h>

namespace lockstep::optim {

namespace {

// Handing a thread less than this costs more than it brings.
constexpr std::int64_t kElementsForAThread = 32768;

}  // namespace

void parallel_blocks(std::span<const std::int64_t> counts, std::int64_t block_elements,
                     const std::function<void(const Block&)>& work) {
  // ends[r] is the number of the block after the last of range r.
  std::vector<std::int64_t> ends;
  ends.reserve(counts.size());
  std::int64_t num_blocks = 0;
  for (const std::int64_t count : counts)
    ends.push_back(num_blocks += (count + block_elements - 1) / block_elements);
  if (num_blocks == 0) return;
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsForAThread / block_elements);
  device::parallel_pieces(num_blocks, grain, [&](std::int64_t first, std::int64_t last) {
    auto range =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (std::int64_t number = first; number < last; ++number) {
      while (ends[range] <= number) ++range;
      const std::int64_t begin = (number - (range == 0 ? 0 : ends[range - 1])) * block_elements;
      work({.range = range,
            .number = number,
            .begin = begin,
            .count = std::min(block_elements, counts[range] - begin)});
    }
  });
}

}  // namespace lockstep::optim

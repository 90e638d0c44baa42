#include <lockstep/device/parallel_pieces.h>

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

namespace lockstep::device {

void parallel_pieces(std::int64_t count, std::int64_t grain,
                     const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  if (count <= 0) return;
  const auto pieces = (count + grain - 1) / grain;
  if (pieces == 1 || at::get_num_threads() == 1 || at::in_parallel_region()) {
    body(0, count);
    return;
  }
  // Each piece is represented by one byte, whose address tells its number.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<char> places(static_cast<std::size_t>(pieces));
  auto bytes = at::from_blob(places.data(), {pieces}, at::TensorOptions(at::kChar));
  auto iterator = at::TensorIterator::nullary_op(bytes);
  iterator.for_each(
      [&](char** data, const std::int64_t*, std::int64_t size) {
        const auto first = *data - places.data();
        body(first * grain, std::min(count, (first + size) * grain));
      },
      /*grain_size=*/1);
}

}  // namespace lockstep::device

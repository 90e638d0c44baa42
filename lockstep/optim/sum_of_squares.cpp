#include <lockstep/optim/sum_of_squares.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/parallel_blocks.h>

namespace lockstep::optim {

namespace {

// As many at once as keep a GPU busy and its memory free: 64 MiB of doubles.
constexpr std::int64_t kBlocksAtOnce = 2048;

// One-dimensional, contiguous, and in the process's memory or on a CUDA device: there are devices
// that have no doubles. In the process's memory, of a type that the kernel knows.
at::Tensor prepared(const at::Tensor& values) {
  const auto type = values.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16)
    throw UsageError("a norm of {} values was asked for: Float, Double, Half and BFloat16 have one",
                     c10::toString(type));
  at::Tensor flat = values.detach().contiguous().view({-1});
  if (flat.is_cuda()) return flat;
  return flat.to(at::kCPU, type == at::kDouble ? at::kDouble : at::kFloat);
}

// The kernel's order of additions in LibTorch's operators, one double for each block.
at::Tensor folded(const at::Tensor& flat) {
  std::vector<at::Tensor> sums;
  const std::int64_t at_once = kBlocksAtOnce * kNormBlock;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += at_once) {
    const std::int64_t count = std::min(at_once, flat.numel() - begin);
    at::Tensor x = flat.narrow(0, begin, count).to(at::kDouble);
    if (count % kNormBlock != 0) x = at::constant_pad_nd(x, {0, kNormBlock - count % kNormBlock});
    x = at::mul(x, x).view({-1, kNormBlock});
    for (std::int64_t width = kNormBlock / 2; width > 0; width /= 2)
      x = at::add(x.narrow(1, 0, width), x.narrow(1, width, width));
    sums.push_back(x.view({-1}));
  }
  return sums.empty() ? at::empty({0}, flat.options().dtype(at::kDouble)) : at::cat(sums);
}

void sum_in_memory(const std::vector<at::Tensor>& tensors, std::vector<double>& sums) {
  // A device's tensors are counted, so that blocks keep their numbers, and left out.
  std::vector<std::int64_t> counts;
  for (const at::Tensor& flat : tensors) counts.push_back(flat.numel());
  parallel_blocks(counts, kNormBlock, [&](const Block& block) {
    const at::Tensor& flat = tensors[block.range];
    if (flat.is_cuda()) return;
    sums[static_cast<std::size_t>(block.number)] =
        flat.scalar_type() == at::kFloat
            ? sum_of_squares(flat.data_ptr<float>() + block.begin, block.count)
            : sum_of_squares(flat.data_ptr<double>() + block.begin, block.count);
  });
}

}  // namespace

std::int64_t num_norm_blocks(const at::Tensor& values) {
  return (values.numel() + kNormBlock - 1) / kNormBlock;
}

std::vector<double> sum_of_squares_of_blocks(const at::Tensor& values, std::int64_t first_block,
                                             std::int64_t num_blocks) {
  const std::int64_t there = num_norm_blocks(values);
  if (first_block < 0 || num_blocks < 0 || first_block > there - num_blocks)
    throw UsageError("blocks {} to {} of a tensor that has {} were asked for", first_block,
                     first_block + num_blocks, there);
  const std::int64_t begin = first_block * kNormBlock;
  const std::int64_t end = std::min(values.numel(), begin + num_blocks * kNormBlock);
  const at::Tensor part = values.detach().contiguous().view({-1}).slice(0, begin, end);
  return sum_of_squares_of_blocks({&part, 1});
}

std::vector<double> sum_of_squares_of_blocks(std::span<const at::Tensor> tensors) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  std::vector<std::int64_t> offsets;
  std::int64_t num_blocks = 0;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(prepared(tensor));
    offsets.push_back(num_blocks);
    num_blocks += num_norm_blocks(tensor);
  }
  std::vector<double> sums(static_cast<std::size_t>(num_blocks));
  sum_in_memory(flat, sums);

  std::vector<bool> done(flat.size());
  for (std::size_t first = 0; first < flat.size(); ++first) {
    if (!flat[first].is_cuda() || done[first]) continue;
    std::vector<std::size_t> members;
    std::vector<at::Tensor> parts;
    for (std::size_t i = first; i < flat.size(); ++i)
      if (flat[i].device() == flat[first].device()) {
        members.push_back(i);
        parts.push_back(folded(flat[i]));
        done[i] = true;
      }
    const at::Tensor host = at::cat(parts).cpu();
    const double* next = host.data_ptr<double>();
    for (const std::size_t i : members) {
      std::copy_n(next, num_norm_blocks(flat[i]), sums.begin() + offsets[i]);
      next += num_norm_blocks(flat[i]);
    }
  }
  return sums;
}

}  // namespace lockstep::optim

#include <lockstep/optim/sum_of_squares.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/parallel_blocks.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/optim/kernels/cuda/kernels.h>
#endif

namespace lockstep::optim {

namespace {

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

#ifdef LOCKSTEP_HAVE_CUDA

cuda::Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return cuda::Element::float64;
    case at::kHalf: return cuda::Element::float16;
    case at::kBFloat16: return cuda::Element::bfloat16;
    default: return cuda::Element::float32;
  }
}

// One double for each block of tensors on one device.
at::Tensor sums_on_device(const std::vector<at::Tensor>& tensors) {
  std::int64_t num_blocks = 0;
  for (const at::Tensor& flat : tensors) num_blocks += num_norm_blocks(flat);
  const at::Tensor sums = at::empty({num_blocks}, tensors.front().options().dtype(at::kDouble));
  std::vector<cuda::NormTensor> table;
  double* next = sums.data_ptr<double>();
  for (const at::Tensor& flat : tensors) {
    table.push_back({.count = flat.numel(),
                     .values = flat.data_ptr(),
                     .sums = next,
                     .type = element_of(flat.scalar_type())});
    next += num_norm_blocks(flat);
  }
  const c10::cuda::CUDAGuard on_device(sums.device());
  cuda::sum_of_squares(table.data(), table.size(), c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sums;
}

#else

// No tensor is on a GPU that LibTorch does not know.
at::Tensor sums_on_device(const std::vector<at::Tensor>& tensors) {
  LOCKSTEP_CHECK(false, "{} tensors on CUDA", tensors.size());
}

#endif

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
        parts.push_back(flat[i]);
        done[i] = true;
      }
    const at::Tensor host = sums_on_device(parts).cpu();
    const double* next = host.data_ptr<double>();
    for (const std::size_t i : members) {
      std::copy_n(next, num_norm_blocks(flat[i]), sums.begin() + offsets[i]);
      next += num_norm_blocks(flat[i]);
    }
  }
  return sums;
}

}  // namespace lockstep::optim

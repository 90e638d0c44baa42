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

// As add_in_order(): the sums, and then their sum.
at::Tensor add_on_device(const at::Tensor& values,
                         const std::vector<std::vector<mesh::Interval>>& sums) {
  const auto num_sums = static_cast<std::int64_t>(sums.size());
  std::vector<std::int64_t> entries = {0}, segments;
  for (const auto& sum : sums) {
    for (const mesh::Interval& segment : sum)
      segments.insert(segments.end(), {segment.begin, segment.end});
    entries.push_back(static_cast<std::int64_t>(segments.size() / 2));
  }
  entries.insert(entries.end(), segments.begin(), segments.end());
  const std::size_t of_all = entries.size();
  entries.insert(entries.end(), {0, 1, 0, num_sums});
  const at::Tensor host = at::empty({static_cast<std::int64_t>(entries.size())},
                                    at::dtype(at::kLong).pinned_memory(true));
  std::ranges::copy(entries, host.data_ptr<std::int64_t>());
  const at::Tensor on_gpu = host.to(values.device(), /*non_blocking=*/true);
  const auto* table = on_gpu.data_ptr<std::int64_t>();
  const at::Tensor results = at::empty({num_sums + 1}, values.options());
  auto* numbers = results.data_ptr<double>();
  const c10::cuda::CUDAGuard on_device(values.device());
  CUstream_st* const stream = c10::cuda::getCurrentCUDAStream().stream();
  cuda::add_in_order(values.data_ptr<double>(), table, num_sums, numbers, stream);
  cuda::add_in_order(numbers, table + of_all, 1, numbers + num_sums, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return results[num_sums];
}

#else

// No tensor is on a GPU that LibTorch does not know.
at::Tensor sums_on_device(const std::vector<at::Tensor>& tensors) {
  LOCKSTEP_CHECK(false, "{} tensors on CUDA", tensors.size());
}

at::Tensor add_on_device(const at::Tensor& values,
                         const std::vector<std::vector<mesh::Interval>>& sums) {
  LOCKSTEP_CHECK(false, "{} sums of {} numbers on CUDA", sums.size(), values.numel());
}

#endif

void sum_in_memory(const std::vector<at::Tensor>& tensors, double* sums) {
  // A device's tensors are counted, so that blocks keep their numbers, and left out.
  std::vector<std::int64_t> counts;
  for (const at::Tensor& flat : tensors) counts.push_back(flat.numel());
  parallel_blocks(counts, kNormBlock, [&](const Block& block) {
    const at::Tensor& flat = tensors[block.range];
    if (flat.is_cuda()) return;
    sums[block.number] = flat.scalar_type() == at::kFloat
                             ? sum_of_squares(flat.data_ptr<float>() + block.begin, block.count)
                             : sum_of_squares(flat.data_ptr<double>() + block.begin, block.count);
  });
}

}  // namespace

std::int64_t num_norm_blocks(const at::Tensor& values) {
  return (values.numel() + kNormBlock - 1) / kNormBlock;
}

at::Tensor sums_of_squares(std::span<const at::Tensor> tensors) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  std::vector<std::int64_t> offsets;
  std::int64_t num_blocks = 0;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(prepared(tensor));
    offsets.push_back(num_blocks);
    num_blocks += num_norm_blocks(tensor);
  }
  const bool on_one_device = !flat.empty() && flat.front().is_cuda() &&
                             std::ranges::all_of(flat, [&](const at::Tensor& one) {
                               return one.device() == flat.front().device();
                             });
  if (on_one_device) return sums_on_device(flat);

  const at::Tensor sums = at::zeros({num_blocks}, at::kDouble);
  sum_in_memory(flat, sums.data_ptr<double>());
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
      std::copy_n(next, num_norm_blocks(flat[i]), sums.data_ptr<double>() + offsets[i]);
      next += num_norm_blocks(flat[i]);
    }
  }
  return sums;
}

at::Tensor add_in_order(const at::Tensor& values,
                        const std::vector<std::vector<mesh::Interval>>& sums) {
  if (values.is_cuda()) return add_on_device(values, sums);
  const auto* numbers = values.data_ptr<double>();
  double total = 0;
  for (const auto& segments : sums) {
    double sum = 0;
    for (const mesh::Interval& segment : segments)
      for (std::int64_t i = segment.begin; i < segment.end; ++i) sum += numbers[i];
    total += sum;
  }
  return at::scalar_tensor(total, at::kDouble);
}

}  // namespace lockstep::optim

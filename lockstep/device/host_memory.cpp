#include <lockstep/device/host_memory.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/error.h>

#if defined(LOCKSTEP_HAVE_CUDA)
#include <ATen/cuda/CUDAEvent.h>
#include <cuda_runtime_api.h>
#endif

namespace lockstep::device {

namespace {

// Asks for large pages, which some systems give only on request: they make filling memory for the
// first time several times faster.
void ask_for_large_pages([[maybe_unused]] const at::Tensor& memory) {
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kLargePage = 2 << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data_ptr());
  const std::uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const std::uintptr_t end = (address + memory.nbytes()) / kLargePage * kLargePage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor host_memory(std::int64_t elements, at::ScalarType type, c10::Device device) {
#if defined(LOCKSTEP_HAVE_CUDA)
  if (device.is_cuda() && elements > 0) {
    void* memory = nullptr;
    const std::size_t bytes = static_cast<std::size_t>(elements) * c10::elementSize(type);
    if (const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
        status != cudaSuccess) {
      (void)cudaGetLastError();  // clears it, or the next kernel launch would be blamed for it
      throw UsageError("{:.1f} MiB of the host's memory could not be pinned for {}: {}; offload "
                       "less, or start fewer ranks on this host",
                       static_cast<double>(bytes) / (1 << 20), device.str(),
                       cudaGetErrorString(status));
    }
    return at::from_blob(
        memory, {elements}, [](void* memory) { (void)cudaFreeHost(memory); }, at::dtype(type));
  }
#endif
  (void)device;
  at::Tensor memory = at::empty({elements}, type);
  ask_for_large_pages(memory);
  return memory;
}

at::Tensor on_device(at::ArrayRef<std::int64_t> numbers, c10::ScalarType type, c10::Device device) {
  // LibTorch keeps memory that it has pinned until the copy is done.
  at::Tensor here = at::empty({static_cast<std::int64_t>(numbers.size())},
                              at::dtype(type).pinned_memory(device.is_cuda()));
  AT_DISPATCH_INTEGRAL_TYPES(type, "on_device", [&] {
    std::transform(numbers.begin(), numbers.end(), here.data_ptr<scalar_t>(),
                   [](std::int64_t number) { return static_cast<scalar_t>(number); });
  });
  return here.to(device, /*non_blocking=*/true);
}

struct HostCopy::OnItsWay {
  at::Tensor copy;
#if defined(LOCKSTEP_HAVE_CUDA)
  at::cuda::CUDAEvent arrived;
#endif
};

HostCopy::HostCopy(const at::Tensor& tensor) : copy_(std::make_shared<OnItsWay>()) {
  const at::Tensor from = tensor.detach();
#if defined(LOCKSTEP_HAVE_CUDA)
  if (from.is_cuda()) {
    copy_->copy = at::empty(from.sizes(), at::dtype(from.scalar_type()).pinned_memory(true));
    copy_->copy.copy_(from, /*non_blocking=*/true);
    copy_->arrived.record(c10::cuda::getCurrentCUDAStream(from.device().index()));
    return;
  }
#endif
  copy_->copy = from.to(at::kCPU, from.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

const at::Tensor& HostCopy::get() const {
  LOCKSTEP_CHECK(copy_ != nullptr, "a copy of no tensor");
#if defined(LOCKSTEP_HAVE_CUDA)
  // Returns at once if there is no event.
  copy_->arrived.synchronize();
#endif
  return copy_->copy;
}

void wait_for(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

}  // namespace lockstep::device

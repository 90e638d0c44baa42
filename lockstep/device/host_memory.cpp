#include <lockstep/device/host_memory.h>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/error.h>

#if defined(LOCKSTEP_HAVE_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace lockstep::device {

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
  return at::empty({elements}, type);
}

void wait_for(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

}  // namespace lockstep::device

#include <lockstep/device/cuda.h>

#include <lockstep/base/error.h>

#if defined(LOCKSTEP_HAVE_CUDA)
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#endif

namespace lockstep::device {

#if defined(LOCKSTEP_HAVE_CUDA)

namespace {

void check(cudaError_t status, const char* what, int index) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // clears it, or the next kernel launch would be blamed for it
  throw UsageError("GPU {} does not answer: {}: {}; see what nvidia-smi says about it", index, what,
                   cudaGetErrorString(status));
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute", index);
  return value;
}

}  // namespace

int num_gpus() { return c10::cuda::device_count(); }

std::string gpu_name(int index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties", index);
  return properties.name;
}

std::string gpu_bus_id(int index) {
  char id[32] = {};
  check(cudaDeviceGetPCIBusId(id, sizeof(id), index), "cudaDeviceGetPCIBusId", index);
  return id;
}

std::pair<int, int> gpu_capability(int index) {
  return {attribute(cudaDevAttrComputeCapabilityMajor, index),
          attribute(cudaDevAttrComputeCapabilityMinor, index)};
}

Memory gpu_memory(int index) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo", index);
  return {free_bytes, total_bytes};
}

bool gpus_reach_each_other(int one, int other) {
  for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
    int reaches = 0;
    check(cudaDeviceCanAccessPeer(&reaches, from, to), "cudaDeviceCanAccessPeer", from);
    if (reaches == 0) return false;
  }
  return true;
}

std::size_t gpu_peak_bytes(int index) {
  const auto stats =
      c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(index));
  return static_cast<std::size_t>(stats.allocated_bytes.front().peak);  // of all pools together
}

#else

namespace {
[[noreturn]] void no_cuda() {
  throw InternalError("a question about a GPU in a build of LibTorch without CUDA");
}
}  // namespace

int num_gpus() { return 0; }
std::string gpu_name(int) { no_cuda(); }
std::string gpu_bus_id(int) { no_cuda(); }
std::pair<int, int> gpu_capability(int) { no_cuda(); }
Memory gpu_memory(int) { no_cuda(); }
bool gpus_reach_each_other(int, int) { no_cuda(); }
std::size_t gpu_peak_bytes(int) { no_cuda(); }

#endif

}  // namespace lockstep::device

// Adds up the time of each kernel that a program runs on the GPU. CUDA loads this library into a
// process if CUDA_INJECTION64_PATH names it; when the process ends, KERNEL_TIMES.<its id> has a
// line for each kernel: nanoseconds, launches and its name, with tabs between them.
#include <cxxabi.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include <cupti.h>

namespace {

#if CUPTI_API_VERSION >= 130200
using Kernel = CUpti_ActivityKernel11;
#elif CUPTI_API_VERSION >= 130000
using Kernel = CUpti_ActivityKernel10;
#else
using Kernel = CUpti_ActivityKernel9;
#endif

struct Spent {
  std::uint64_t nanoseconds = 0;
  std::uint64_t launches = 0;
};

// Never destroyed, because CUPTI's own threads may use them until the process is gone.
std::mutex& mutex = *new std::mutex;
std::map<std::string, Spent>& spent = *new std::map<std::string, Spent>;

void give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *size = 8 << 20;
  *buffer = static_cast<std::uint8_t*>(std::malloc(*size));
  *max_records = 0;  // no limit but the buffer's size
}

void take_buffer(CUcontext /*context*/, std::uint32_t /*stream*/, std::uint8_t* buffer,
                 std::size_t /*size*/, std::size_t used) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, used, &record) == CUPTI_SUCCESS) {
    // Buffers also hold records that other users of CUPTI asked for.
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* const kernel = reinterpret_cast<const Kernel*>(record);
    Spent& its = spent[kernel->name == nullptr ? "unnamed" : kernel->name];
    its.nanoseconds += kernel->end - kernel->start;
    ++its.launches;
  }
  std::free(buffer);
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

void write_times() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const char* const path = std::getenv("KERNEL_TIMES");
  const std::lock_guard lock(mutex);
  if (path == nullptr || spent.empty()) return;
  std::FILE* const file = std::fopen((path + ("." + std::to_string(::getpid()))).c_str(), "w");
  if (file == nullptr) return std::perror(path);
  for (const auto& [name, its] : spent)
    std::fprintf(file, "%llu\t%llu\t%s\n", static_cast<unsigned long long>(its.nanoseconds),
                 static_cast<unsigned long long>(its.launches), demangled(name).c_str());
  std::fclose(file);
}

}  // namespace

// CUPTI looks for this name and calls it first.
extern "C" int InitializeInjection() {
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  const CUptiResult result = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  if (result != CUPTI_SUCCESS) {
    const char* text = nullptr;
    cuptiGetResultString(result, &text);
    std::fprintf(stderr, "CUPTI tells nothing of kernels: %s\n", text);
    return 1;
  }
  std::atexit(write_times);
  return 1;
}

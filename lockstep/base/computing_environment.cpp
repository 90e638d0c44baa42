#include <lockstep/base/computing_environment.h>

#include <lockstep/base/environment.h>

namespace lockstep {

namespace {

// Null where OpenBLAS can be left to itself.
const char* openblas_core() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return "SKYLAKEX";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "HASWELL";
#endif
  return nullptr;
}

}  // namespace

std::vector<std::pair<const char*, const char*>> computing_environment() {
  std::vector<std::pair<const char*, const char*>> all = {{"UCX_DEBUG_SIGNO", "0"}};
  if (!environment_variable("OMP_WAIT_POLICY")) all.emplace_back("GOMP_SPINCOUNT", "1000");
  if (const char* core = openblas_core()) all.emplace_back("OPENBLAS_CORETYPE", core);
  return all;
}

}  // namespace lockstep

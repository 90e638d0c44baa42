// The setup of a rank: its command, its environment, and the processor cores it may use.
#pragma once

#include <sched.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/launch/rendezvous/messages.h>

namespace lockstep::launch {

enum class ProgramKind {
  automatic,  // a file ending in .py is a Python script, anything else is executed as it is
  executable,
  python_module,
};

// Finds the program and returns the whole command, the first word being a path that can be
// executed. UsageError names the paths that were tried and what to do.
std::vector<std::string> resolve_command(const std::vector<std::string>& words, ProgramKind kind);

struct RankEnvironmentOptions {
  std::string run_id;
  std::string role;
  int secret_fd = -1;
  int progress_fd = -1;
  std::string flight_directory;
  int threads = 1;  // for OMP_NUM_THREADS and OPENBLAS_NUM_THREADS, where the user set neither
};

// The variables ("NAME=value") that torchrun sets, so that programs written for it run unchanged,
// and ours, as lockstep/base/environment.h reads them.
std::vector<std::string> rank_environment(const RankTable& table, int local_rank,
                                          const RankEnvironmentOptions& options);

// The same for a spare: the variables that libraries read when they are loaded. It gets the rest
// when it takes the place of a rank.
std::vector<std::string> spare_environment(const RankEnvironmentOptions& options);

// Variables that a process which computes should be started with, unless its user has set them:
//
// - OPENBLAS_CORETYPE: an OpenBLAS that is older than the CPU takes it for one with SSE3. The
//   one of Debian 12 computes at a fifth of the speed of Xeons of 2023, which have AVX-512.
// - GOMP_SPINCOUNT, unless OMP_WAIT_POLICY says how to wait: GNU's OpenMP threads spin for
//   milliseconds between two loops, and where other processes want the cores too, that takes them
//   from the very thread that is waited for. With one thread a core, a small GPT trained on two
//   busy cores at 2.7 thousand tokens a second; with this at 16 to 24, and with threads that sleep
//   at once (OMP_WAIT_POLICY=passive) at 22 to 28. On idle cores, threads that sleep at once lost
//   up to three quarters (8 threads, tiny matrices), and with this at most a fifth.
// - UCX_DEBUG_SIGNO: UCX, which comes with newer Open MPIs, takes SIGHUP for itself when it is
//   loaded, even where nohup had it ignored.
std::vector<std::pair<const char*, const char*>> computing_environment();

// Threads each rank should run: what the user set (OMP_NUM_THREADS), otherwise its share of the
// cores.
int threads_per_rank(int usable_cores, int num_local_ranks);

// The logical CPUs this process may run on. CPUs of one package, and within it of one core, stand
// next to each other, so that neighbouring shares overlap as little as they can.
std::vector<int> allowed_cpus();

// An equal, contiguous share of the CPUs for each rank. Empty where there are not enough cores for
// every thread of every rank: then the kernel's scheduler does better than any pinning.
std::vector<std::vector<int>> core_shares(const std::vector<int>& cpus, int usable, int num_ranks,
                                          int threads_per_rank);

// Restricts a process, with all threads it has, to these CPUs; done as far as the kernel allows.
void pin(int pid, const std::vector<int>& cpus);

// A set of logical CPUs as the kernel takes it, of whatever size.
struct CpuSet {
  explicit CpuSet(const std::vector<int>& cpus);
  ~CpuSet() { CPU_FREE(set); }
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;

  std::size_t bytes = 0;
  cpu_set_t* set = nullptr;
};

// GPUs that ranks started here would see: device files of NVIDIA's driver, fewer where
// CUDA_VISIBLE_DEVICES says so. Counted without loading any GPU library.
int num_visible_gpus(const std::filesystem::path& devices = "/dev");

}  // namespace lockstep::launch

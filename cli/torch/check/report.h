// The findings of `lockstep check`, as plain data and as JSON. backends.cpp and machine.cpp find
// them, report.cpp gathers them from every rank, problems.cpp judges and print.cpp prints them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>

namespace lockstep::comm {
class Communicator;
}

namespace lockstep::cli::inspection {

// Whether something works, and why (not).
struct Answer {
  bool yes = false;
  std::string reason;
};

// One process: what is its own.
struct Rank {
  int rank = 0;
  int local_rank = 0;
  std::string host;            // its name
  std::string host_id;         // equal for ranks that share memory
  std::vector<int> cpus;       // logical CPUs it may run on
  int num_threads = 1;         // that LibTorch computes with
  bool threads_chosen = true;  // somebody has set OMP_NUM_THREADS
  std::string device;          // "cpu", "cuda:1"
  std::string device_name;
  std::string device_id;  // of a GPU, the same for whoever uses it; empty on a CPU
  std::uint64_t device_free_bytes = 0;
  std::uint64_t device_total_bytes = 0;
  std::int64_t open_files = 0;
  std::int64_t open_files_limit = -1;     // -1: none
  std::int64_t locked_memory_limit = -1;  // in bytes; -1: none
};

// Two GPUs of a host, by their numbers there.
struct GpuPair {
  int a = 0;
  int b = 0;
  bool reach_each_other = false;  // without the host's memory
  double bandwidth_gbps = 0;      // of copies one way, 10^9 bytes a second
};

// The machine around it.
struct Host {
  std::string name;
  std::string id;
  std::vector<int> ranks;
  std::string system;  // "Linux 6.1.0, x86_64"
  std::string cpu;
  int num_cores = 1;      // that all its ranks together may keep busy
  double cpu_quota = -1;  // of its control group, in cores; -1: none
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
  std::vector<std::string> gpus;  // that LibTorch reaches, by name
  int num_gpu_files = 0;          // that NVIDIA's driver shows
  std::vector<GpuPair> gpu_pairs;
  std::string torch_version;
  bool torch_has_cuda = false;
  std::string torch_build;  // LibTorch's own words
  std::string blas;         // the file that multiplies matrices; empty where it is inside LibTorch
  Answer bf16;
  Answer fp8;
  std::int64_t shared_memory_bytes = -1;  // size of /dev/shm; -1: there is none
  std::int64_t tcp_buffer_bytes = -1;     // the most that a connection's receive buffer may grow to
  bool infiniband = false;
};

struct Backend {
  std::string name;
  bool built = false;  // it is in this build
  Answer works;
};

struct Pair {
  int a = 0;
  int b = 0;
  std::string transport;
  double latency_us = 0;      // one way
  double bandwidth_gbps = 0;  // 10^9 bytes a second, one way
};

struct Problem {
  bool prevents_training = false;
  std::string what;
  std::string fix;
};

struct Report {
  std::string version;
  std::string launcher;
  bool has_secret = true;
  std::string asked_backend;  // --backend
  std::string backend;        // what the ranks talk over; empty for one rank
  std::vector<Host> hosts;
  std::vector<Rank> ranks;
  std::vector<Backend> backends;  // as tried on the first host
  std::vector<Pair> pairs;
  std::int64_t num_pairs = 0;  // that there are; pairs holds those that were measured
  std::vector<Problem> problems;

  bool can_train() const;
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Answer, yes, reason)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Rank, rank, local_rank, host, host_id, cpus, num_threads,
                                   threads_chosen, device, device_name, device_id,
                                   device_free_bytes, device_total_bytes, open_files,
                                   open_files_limit, locked_memory_limit)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuPair, a, b, reach_each_other, bandwidth_gbps)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Host, name, id, ranks, system, cpu, num_cores, cpu_quota,
                                   free_bytes, total_bytes, gpus, num_gpu_files, gpu_pairs,
                                   torch_version, torch_has_cuda, torch_build, blas, bf16, fp8,
                                   shared_memory_bytes, tcp_buffer_bytes, infiniband)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Backend, name, built, works)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Pair, a, b, transport, latency_us, bandwidth_gbps)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Problem, prevents_training, what, fix)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Report, version, launcher, has_secret, asked_backend, backend,
                                   hosts, ranks, backends, pairs, num_pairs, problems)

// Puts the machines that several ranks describe together: one for each host, with the ranks on it.
std::vector<Host> merge_hosts(const std::vector<Rank>& ranks, const std::vector<Host>& described);

// Every rank's text, in rank order, on every rank. All ranks call it. CommError.
std::vector<std::string> gather_texts(comm::Communicator& world, const std::string& text);

// Tries out which backends work on this machine.
//
// Adds up numbers between two ranks over every backend of this build (one rank for nccl and mpi),
// each in a process of its own: what crashes or hangs there is an answer like any other. The
// backends that this build lacks are listed with what they need.
//
// Forks: call it before anything has started threads or a GPU. Returns by the deadline.
std::vector<Backend> try_backends(Deadline deadline);

// Describes this process. Call it after joining the job, so that the job's open files are counted.
Rank describe_rank(const LaunchEnvironment& launch);

// Describes the machine that this process runs on. Only the first rank of a host tries out the
// number formats, so that ranks do not disturb each other's figures.
Host describe_host(const LaunchEnvironment& launch);

// The problems that the report shows, each with its remedy. Problems that prevent training come
// first.
std::vector<Problem> find_problems(const Report& report);

enum class Style { plain, terminal };

// The report for people, at most 80 columns wide (long names of hosts and files aside).
std::string to_text(const Report& report, Style style);

}  // namespace lockstep::cli::inspection

#include <cli/torch/check/report.h>

#include <algorithm>
#include <set>

#include <lockstep/base/error.h>
#include <lockstep/comm/backends/table.h>

#include <cli/torch/check/pairs.h>

namespace lockstep::cli::inspection {

namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::uint64_t kMemoryPerRank = 512 * kMiB;  // LibTorch alone takes a third of that
constexpr std::int64_t kFewestFiles = 256;
constexpr std::int64_t kSmallTcpBuffer = 4 * kMiB;  // Linux's default is 6
constexpr std::int64_t kSmallShm = 256 * kMiB;      // Docker's default is 64

class Judge {
 public:
  explicit Judge(const Report& report) : report_(report) {}

  std::vector<Problem> run() {
    judge_backends();
    for (const Host& host : report_.hosts) {
      judge_gpus(host);
      judge_cores(host);
      judge_libraries(host);
      judge_memory(host);
    }
    judge_limits();
    judge_job();
    judge_pairs();
    std::stable_partition(found_.begin(), found_.end(),
                          [](const Problem& problem) { return problem.prevents_training; });
    return std::move(found_);
  }

 private:
  void prevents(std::string what, std::string fix) {
    found_.push_back({true, std::move(what), std::move(fix)});
  }
  void advise(std::string what, std::string fix) {
    found_.push_back({false, std::move(what), std::move(fix)});
  }

  // "host a: " where there are several.
  std::string on(const Host& host) const {
    return report_.hosts.size() > 1 ? fmt::format("host {}: ", host.name) : "";
  }
  std::vector<const Rank*> ranks_of(const Host& host) const {
    std::vector<const Rank*> ranks;
    for (const int rank : host.ranks)
      ranks.push_back(&report_.ranks[static_cast<std::size_t>(rank)]);
    return ranks;
  }

  void judge_backends() {
    for (const Backend& backend : report_.backends) {
      const auto row = comm::backends::find(backend.name);
      const bool own = row && row->needs_to_build.empty();
      if (backend.works.yes || !backend.built || (!own && backend.name != report_.asked_backend))
        continue;
      prevents(
          fmt::format("the backend {} does not work here: {}", backend.name, backend.works.reason),
          own ? "a container or a security module may forbid what it uses (memfd_create, Unix "
                "sockets, connections to 127.0.0.1)"
              : "choose another one with --backend");
    }
  }

  void judge_gpus(const Host& host) {
    const auto ranks = ranks_of(host);
    std::set<std::string> used;
    std::size_t num_with_gpu = 0;
    for (const Rank* rank : ranks)
      if (!rank->device_id.empty()) {
        ++num_with_gpu;
        used.insert(rank->device_id);
      }
    if (used.size() < num_with_gpu)
      prevents(fmt::format("{}{} ranks share {} GPU{}", on(host), num_with_gpu, used.size(),
                           used.size() == 1 ? "" : "s"),
               fmt::format("start --nproc-per-node {}; DeviceManager refuses to share a GPU unless "
                           "told GpuUse::shared, and NCCL always does",
                           used.size()));
    if (host.num_gpu_files > 0 && host.gpus.empty()) {
      if (host.torch_has_cuda)
        prevents(fmt::format("{}NVIDIA's driver shows {} GPUs, but CUDA reaches none", on(host),
                             host.num_gpu_files),
                 "see what nvidia-smi says; the driver must be at least as new as the CUDA that "
                 "LibTorch was built for");
      else
        advise(fmt::format("{}{} GPUs are not used: this LibTorch was built without CUDA", on(host),
                           host.num_gpu_files),
               "build Lockstep with a LibTorch that has CUDA (Torch_DIR)");
    }
    const auto far = std::ranges::find_if(
        host.gpu_pairs, [](const GpuPair& pair) { return !pair.reach_each_other; });
    if (far != host.gpu_pairs.end())
      advise(
          fmt::format("{}GPUs {} and {} do not reach each other's memory ({:.1f} GB/s): what "
                      "they exchange goes through the host's",
                      on(host), far->a, far->b, far->bandwidth_gbps),
          "nvidia-smi topo -m shows how they are connected; a virtual machine, or access control "
          "of PCIe (ACS), may be in the way");
  }

  void judge_cores(const Host& host) {
    const auto ranks = ranks_of(host);
    const int num_ranks = static_cast<int>(ranks.size());
    int num_threads = 0;
    bool chosen = true;
    for (const Rank* rank : ranks) {
      num_threads += rank->num_threads;
      chosen &= rank->threads_chosen;
    }
    if (num_ranks > host.num_cores)
      advise(fmt::format("{}{} ranks take turns on {} core{}", on(host), num_ranks, host.num_cores,
                         host.num_cores == 1 ? "" : "s"),
             fmt::format("start --nproc-per-node {}, or allow more cores (affinity, container)",
                         host.num_cores));
    if (num_ranks > 1 && num_threads > std::max(host.num_cores, num_ranks))
      advise(fmt::format("{}{} threads of {} ranks compete for {} cores{}", on(host), num_threads,
                         num_ranks, host.num_cores, chosen ? "" : ": OMP_NUM_THREADS is not set"),
             fmt::format("set OMP_NUM_THREADS={} (lockstep run does, unless it is set)",
                         std::max(1, host.num_cores / num_ranks)));
  }

  void judge_libraries(const Host& host) {
    const Host& first = report_.hosts.front();
    if (host.torch_version != first.torch_version)
      advise(fmt::format("host {} has LibTorch {}, host {} has {}", host.name, host.torch_version,
                         first.name, first.torch_version),
             "install the same one everywhere: results differ in their last bits otherwise");
    const auto has = [&](const char* word) { return host.blas.find(word) != std::string::npos; };
    const std::string file = host.blas.substr(host.blas.rfind('/') + 1);
    if (file.starts_with("libblas.so") && !has("openblas") && !has("mkl") && !has("blis") &&
        !has("atlas"))
      advise(fmt::format("{}matrices are multiplied by the reference BLAS ({}), about ten "
                         "times slower than OpenBLAS",
                         on(host), host.blas),
             "install libopenblas0-pthread, or choose it with update-alternatives --config "
             "libblas.so.3-$(uname -m)-linux-gnu");
  }

  void judge_memory(const Host& host) {
    const std::uint64_t wanted = kMemoryPerRank * host.ranks.size();
    if (host.free_bytes < wanted)
      advise(
          fmt::format("{}{} MiB of memory are free for {} rank{}", on(host), host.free_bytes / kMiB,
                      host.ranks.size(), host.ranks.size() == 1 ? "" : "s"),
          "end what else is running, raise the container's limit, or start fewer ranks: each "
          "takes some 200 MiB before it holds a single weight");
    const auto asked_for = comm::backends::find(report_.asked_backend);
    const bool needs_shm = (asked_for && asked_for->through_dev_shm) || host.gpus.size() > 1;
    if (needs_shm && host.shared_memory_bytes < kSmallShm)
      advise(fmt::format("{}/dev/shm holds {} MiB, and NCCL and MPI pass messages through it",
                         on(host), std::max<std::int64_t>(0, host.shared_memory_bytes) / kMiB),
             "enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm");
  }

  void judge_limits() {
    std::vector<int> few_files, little_locked;
    std::int64_t wanted = kFewestFiles;
    for (const Rank& rank : report_.ranks) wanted = std::max(wanted, 2 * rank.open_files);
    for (const Rank& rank : report_.ranks) {
      if (rank.open_files_limit >= 0 && rank.open_files_limit < wanted)
        few_files.push_back(rank.rank);
      if (rank.locked_memory_limit >= 0) little_locked.push_back(rank.rank);
    }
    if (!few_files.empty()) {
      const Rank& rank = report_.ranks[static_cast<std::size_t>(few_files.front())];
      prevents(fmt::format("{} may open only {} files ({} are open now, before any data set)",
                           list_ranks(few_files), rank.open_files_limit, rank.open_files),
               fmt::format("ulimit -n {} before starting, or nofile in "
                           "/etc/security/limits.conf",
                           std::max<std::int64_t>(4096, wanted)));
    }
    const bool infiniband = std::any_of(report_.hosts.begin(), report_.hosts.end(),
                                        [](const Host& host) { return host.infiniband; });
    if (infiniband && !little_locked.empty()) {
      const Rank& rank = report_.ranks[static_cast<std::size_t>(little_locked.front())];
      advise(fmt::format("there is InfiniBand, but {} may lock only {} KiB of memory",
                         list_ranks(little_locked), rank.locked_memory_limit / 1024),
             "ulimit -l unlimited before starting, or memlock in /etc/security/limits.conf: NCCL "
             "and UCX fall back to TCP otherwise");
    }
    for (const Host& host : report_.hosts)
      if (report_.hosts.size() > 1 && host.tcp_buffer_bytes >= 0 &&
          host.tcp_buffer_bytes < kSmallTcpBuffer)
        advise(fmt::format("{}a TCP connection may buffer only {} KiB, too little to fill a fast "
                           "link",
                           on(host), host.tcp_buffer_bytes / 1024),
               "sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216' "
               "net.ipv4.tcp_wmem='4096 65536 16777216'");
  }

  void judge_job() {
    if (!report_.has_secret)
      advise(fmt::format("{} gives this job no secret: one passes through its store, which anyone "
                         "who reaches that can read",
                         report_.launcher),
             "start it with lockstep run, or set LOCKSTEP_SECRET_FILE on every host to a file with "
             "mode 0600");
  }

  static bool stays_on_host(const std::string& link) {
    const auto row = comm::backends::find(link);
    return row && row->between_hosts.empty();
  }

  void judge_pairs() {
    constexpr std::size_t kMostNamed = 8;
    const std::vector<std::size_t> slow = slow_pairs(report_.pairs);
    for (std::size_t i = 0; i < std::min(slow.size(), kMostNamed); ++i) {
      const Pair& pair = report_.pairs[slow[i]];
      advise(fmt::format("ranks {} and {} are much slower together than others over {}: {:.1f} us, "
                         "{:.2f} GB/s",
                         pair.a, pair.b, pair.transport, pair.latency_us, pair.bandwidth_gbps),
             stays_on_host(pair.transport)
                 ? "see what else runs on their cores, and whether they are on one NUMA node"
                 : "see their hosts' link: cable, switch port, negotiated speed, other traffic");
    }
    if (slow.size() > kMostNamed)
      advise(fmt::format("{} more pairs are as slow", slow.size() - kMostNamed),
             "--json lists them all");
  }

  const Report& report_;
  std::vector<Problem> found_;
};

}  // namespace

std::vector<Problem> find_problems(const Report& report) { return Judge(report).run(); }

}  // namespace lockstep::cli::inspection

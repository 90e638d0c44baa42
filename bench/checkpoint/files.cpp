// Saves and loads a checkpoint, and in turn writes and reads the same bytes plainly, which shows
// what the disk (or the page cache) can do. Runs under `lockstep run`, or alone as one rank.
// Arguments: a folder, the rounds, "cold" or "warm" ("cold" also reads files that are not in the
// page cache), and the model's width and layers. The main rank prints a line of JSON for each kind.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/recovery/checkpointer.h>

#include "state.h"

namespace {

namespace fs = std::filesystem;
using namespace lockstep;
using namespace lockstep::bench;

constexpr std::size_t kChunkBytes = 4 << 20;

// The kernel's counters of this process: calls and bytes, for every kind of file, and the processor
// time of its threads.
struct Counted {
  double read_calls = 0, read_bytes = 0, write_calls = 0, written_bytes = 0, cpu_seconds = 0;

  static Counted now() {
    std::ifstream file("/proc/self/io");
    std::map<std::string, double> values;
    std::string key;
    for (double value = 0; file >> key >> value;) values[key] = value;
    timespec cpu = {};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    return {values["syscr:"], values["rchar:"], values["syscw:"], values["wchar:"],
            static_cast<double>(cpu.tv_sec) + static_cast<double>(cpu.tv_nsec) * 1e-9};
  }
};

struct Times {
  std::vector<double> seconds;
  // Sums over all ranks, of reads or of writes, whichever the kind measures.
  std::vector<double> cpu_seconds, calls, bytes;
};

class Bench {
 public:
  Bench(fs::path folder, const GptSize& size)
      : folder_(std::move(folder)),
        dist_(setup_distributed({.device_type = c10::kCPU})),
        ranks_(dist_.world()),
        checkpoints_(ranks_, folder_ / "checkpoints"),
        state_(gpt_state(size, dist_.rank(), dist_.world_size())),
        loaded_(gpt_state(size, dist_.rank(), dist_.world_size())),
        plain_(folder_ / fmt::format("plain-{}", dist_.rank())) {
    fs::create_directories(folder_);
  }

  void round(int number, bool cold) {
    for (const mesh::HeldTensor& tensor : loaded_) tensor.values.zero_();
    // The order alternates, because the disk may be faster at first.
    const bool plain_first = number % 2 == 0;
    const auto in_turn = [&](const std::function<void()>& plain,
                             const std::function<void()>& ours) {
      if (plain_first) plain();
      ours();
      if (!plain_first) plain();
    };
    in_turn([&] { timed("plain", "save", [&] { write_plainly(); }); },
            [&] { timed("lockstep", "save", [&] { save(); }); });
    // Reading once brings the data that was written past the page cache into it.
    load();
    in_turn([&] { timed("plain", "load", [&] { read_plainly(); }); },
            [&] { timed("lockstep", "load", [&] { load(); }); });
    if (cold)
      in_turn(
          [&] {
            forget(plain_);
            timed("plain", "cold load", [&] { read_plainly(); });
          },
          [&] {
            for (const auto& file : fs::directory_iterator(saved_)) forget(file.path());
            timed("lockstep", "cold load", [&] { load(); });
          });
    check_loaded();
    fs::remove(plain_);
    dist_.barrier();
    if (dist_.is_main()) fs::remove_all(folder_ / "checkpoints");
    ::sync();
    dist_.barrier();
  }

  void report() const {
    if (!dist_.is_main()) return;
    for (const auto& [kind, times] : times_)
      fmt::print(
          "{{\"who\": \"{}\", \"what\": \"{}\", \"ranks\": {}, \"bytes\": {}, \"seconds\": "
          "[{:.6f}], \"cpu_seconds\": [{:.6f}], \"calls\": [{:.0f}], \"moved\": [{:.0f}]}}\n",
          kind.first, kind.second, dist_.world_size(), all_bytes_, fmt::join(times.seconds, ", "),
          fmt::join(times.cpu_seconds, ", "), fmt::join(times.calls, ", "),
          fmt::join(times.bytes, ", "));
    std::fflush(stdout);
  }

 private:
  // Measures from when all ranks are there until all are done.
  void timed(const char* who, const char* what, const std::function<void()>& work) {
    const bool saves = std::string_view(what) == "save";
    dist_.barrier();
    const Counted before = Counted::now();
    const auto begin = std::chrono::steady_clock::now();
    work();
    dist_.barrier();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    const Counted after = Counted::now();
    const auto counted = ranks_.sum(
        {saves ? after.write_calls - before.write_calls : after.read_calls - before.read_calls,
         saves ? after.written_bytes - before.written_bytes : after.read_bytes - before.read_bytes,
         static_cast<double>(bytes_of(state_)), after.cpu_seconds - before.cpu_seconds});
    Times& times = times_[{who, what}];
    times.seconds.push_back(took.count());
    times.cpu_seconds.push_back(counted[3]);
    times.calls.push_back(counted[0]);
    times.bytes.push_back(counted[1]);
    all_bytes_ = static_cast<std::uint64_t>(counted[2]);
  }

  void save() {
    const SaveResult result = checkpoints_.save_and_wait({.tensors = state_});
    if (!result.ok()) throw UsageError(result.error);
    saved_ = result.path;
  }

  void load() { load_checkpoint(ranks_, saved_, loaded_, {.complete = {"model/", "optimizer/"}}); }

  static void check(bool done, const char* what) {
    if (done) return;
    std::perror(what);
    std::exit(1);
  }

  // Writes straight from the tensors, in large writes; the data is on disk when it returns.
  void write_plainly() const {
    const int fd = ::open(plain_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    check(fd >= 0, "open");
    for_each_chunk(state_, [&](char* bytes, std::size_t count) {
      check(::write(fd, bytes, count) == static_cast<ssize_t>(count), "write");
    });
    check(::fsync(fd) == 0 && ::close(fd) == 0, "fsync");
  }

  void read_plainly() const {
    const int fd = ::open(plain_.c_str(), O_RDONLY | O_CLOEXEC);
    check(fd >= 0, "open");
    for_each_chunk(loaded_, [&](char* bytes, std::size_t count) {
      check(::read(fd, bytes, count) == static_cast<ssize_t>(count), "read");
    });
    ::close(fd);
  }

  static void for_each_chunk(const std::vector<mesh::HeldTensor>& tensors,
                             const std::function<void(char*, std::size_t)>& visit) {
    for (const mesh::HeldTensor& tensor : tensors) {
      auto* const bytes = static_cast<char*>(tensor.values.data_ptr());
      for (std::size_t at = 0; at < tensor.values.nbytes(); at += kChunkBytes)
        visit(bytes + at, std::min(kChunkBytes, tensor.values.nbytes() - at));
    }
  }

  // Drops a file from the page cache.
  static void forget(const fs::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    check(fd >= 0, "open");
    check(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "posix_fadvise");
    ::close(fd);
  }

  void check_loaded() const {
    for (std::size_t i = 0; i < state_.size(); ++i)
      if (!at::equal(state_[i].values, loaded_[i].values))
        throw UsageError("'{}' did not come back", state_[i].name);
  }

  fs::path folder_;
  DistributedManager dist_;
  RankMessages ranks_;
  Checkpointer checkpoints_;
  std::vector<mesh::HeldTensor> state_, loaded_;
  fs::path plain_, saved_;
  std::uint64_t all_bytes_ = 0;
  std::map<std::pair<std::string, std::string>, Times> times_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: checkpoint_files FOLDER ROUNDS cold|warm [WIDTH LAYERS]\n");
    return 2;
  }
  GptSize size;
  if (argc > 5) {
    size.width = std::atoi(argv[4]);
    size.layers = std::atoi(argv[5]);
  }
  at::set_num_threads(1);
  Bench bench(argv[1], size);
  const bool cold = std::string_view(argv[3]) == "cold";
  for (int round = 0; round < std::atoi(argv[2]); ++round) bench.round(round, cold);
  bench.report();
}

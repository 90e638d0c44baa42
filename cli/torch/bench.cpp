// `lockstep bench collectives`: how fast the collectives are here, as nccl-tests tell it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/comm/backends/table.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/device/device_manager.h>

#include <cli/flags.h>
#include <cli/torch/relaunch.h>

namespace lockstep::cli {

namespace {

using comm::Communicator;

constexpr comm::Operation kOperations[] = {comm::Operation::all_reduce, comm::Operation::all_gather,
                                           comm::Operation::reduce_scatter,
                                           comm::Operation::all_to_all, comm::Operation::broadcast};

// As the flags have it.
struct Settings {
  std::vector<std::string> operations;
  std::string backend = "auto";
  std::string algorithm = "automatic";
  std::string smallest = "4K";
  std::string largest = "64M";
  std::string dtype = "float32";
  std::string device;  // where empty, what the backend takes
  int num_ranks = 2;
  int iterations = 20;
  int warmup = 5;
  bool allocated = false;
  bool json = false;
  std::string report_file;  // where the JSON goes; standard output where empty
};

// The measurement that the settings ask for.
struct Measurement {
  std::vector<comm::Operation> operations;
  comm::Algorithm algorithm = comm::Algorithm::automatic;
  std::size_t smallest = 0;
  std::size_t largest = 0;
  at::ScalarType dtype = at::kFloat;
  c10::DeviceType device = c10::DeviceType::CPU;
};

// "64K", "1M", "1G" or plain bytes.
std::size_t parse_size(const std::string& text, const std::string& flag) {
  std::size_t used = 0;
  unsigned long long value = 0;
  try {
    value = std::stoull(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  const std::string unit = text.substr(used);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (used == 0 || shift < 0 || value == 0 || value > (1ull << 40 >> std::max(shift, 0)))
    throw UsageError("{} is '{}': it must be a size such as 4096, 64K, 1M or 2G", flag, text);
  return static_cast<std::size_t>(value << shift);
}

at::ScalarType parse_dtype(const std::string& text) {
  using comm::DType;
  std::string known;
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16,
                            DType::int32, DType::int64, DType::uint8}) {
    if (text == comm::name(dtype)) return comm::scalar_type_of(dtype);
    known += (known.empty() ? "" : ", ") + std::string(comm::name(dtype));
  }
  throw UsageError("--dtype is '{}': choose one of {}", text, known);
}

bool takes_only_cuda(const std::string& backend) {
  const auto row = comm::backends::find(backend);
  return row && row->tensors == comm::backends::Tensors::on_cuda;
}

c10::DeviceType parse_device(const Settings& settings) {
  const std::string text = !settings.device.empty()            ? settings.device
                           : takes_only_cuda(settings.backend) ? "cuda"
                                                               : "cpu";
  if (text == "cpu") return c10::DeviceType::CPU;
  if (text != "cuda") throw UsageError("--device is '{}': choose cpu or cuda", text);
  if (settings.allocated)
    throw UsageError("--allocated is memory of the host: leave it out, or --device cuda");
  // UsageError where there is none.
  device::DeviceManager::auto_detect(
      {.local_rank = 0, .local_world_size = 1, .type = c10::DeviceType::CUDA});
  return c10::DeviceType::CUDA;
}

c10::Device device_of_rank(const Measurement& asked) {
  return device::DeviceManager::auto_detect(
             {.gpu_use = device::GpuUse::shared, .type = asked.device})
      .device();
}

comm::Operation parse_operation(std::string text) {
  std::replace(text.begin(), text.end(), '-', '_');
  std::string known;
  for (const comm::Operation operation : kOperations) {
    if (text == comm::name(operation)) return operation;
    known += (known.empty() ? "" : ", ") + std::string(comm::name(operation));
  }
  throw UsageError("there is no collective '{}' to measure: choose from {}", text, known);
}

// The operations that were asked for, which must have the algorithm. Where none was asked for, all
// operations that have it.
std::vector<comm::Operation> choose_operations(const Settings& settings,
                                               comm::Algorithm algorithm) {
  std::vector<comm::Operation> chosen;
  for (const std::string& text : settings.operations) {
    chosen.push_back(parse_operation(text));
    comm::check_algorithm(chosen.back(), algorithm);
  }
  if (!chosen.empty()) return chosen;
  for (const comm::Operation operation : kOperations)
    if (comm::has_algorithm(operation, algorithm)) chosen.push_back(operation);
  return chosen;
}

// Before any rank is started, so that a mistake is told once.
Measurement measurement_of(const Settings& settings) {
  comm::check_backend(settings.backend);
  Measurement asked;
  asked.algorithm = comm::algorithm_from_name(settings.algorithm);
  asked.operations = choose_operations(settings, asked.algorithm);
  asked.smallest = parse_size(settings.smallest, "--min");
  asked.largest = parse_size(settings.largest, "--max");
  if (asked.smallest > asked.largest)
    throw UsageError("--min {} is larger than --max {}", settings.smallest, settings.largest);
  asked.dtype = parse_dtype(settings.dtype);
  asked.device = parse_device(settings);
  if (!settings.report_file.empty() && !settings.json)
    throw UsageError("--report writes the JSON that --json asks for: give both");
  if (settings.iterations < 1 || settings.warmup < 0)
    throw UsageError("--iterations {} and --warmup {}: at least 1 and 0", settings.iterations,
                     settings.warmup);
  if (settings.num_ranks < 1 || settings.num_ranks > kMostRanks)
    throw UsageError("--nproc-per-node {}: from 1 to {}", settings.num_ranks, kMostRanks);
  return asked;
}

bool reduces(comm::Operation operation) {
  return operation == comm::Operation::all_reduce || operation == comm::Operation::reduce_scatter;
}

// One operation on buffers of one size, and how to tell that it did the right thing.
struct Trial {
  at::Tensor given;  // what this rank puts in
  double value = 0;  // and the number that is in it where the result is checked
  std::function<void()> call;
  std::function<std::int64_t()> wrong;  // elements that are not what they should be
  double bus_factor = 1;                // bus bandwidth ÷ algorithm bandwidth
};

class Bench {
 public:
  Bench(Communicator& world, c10::Device device, const Measurement& asked, const Settings& settings)
      : world_(world),
        dtype_(asked.dtype),
        device_(device),
        allocated_(settings.allocated),
        options_{.algorithm = asked.algorithm, .launch = comm::Launch::on_wait} {}

  // `count` elements in all on each rank, a multiple of the number of ranks.
  Trial prepare(comm::Operation operation, std::int64_t count) {
    using comm::Operation;
    const int n = world_.size();
    const std::int64_t part = count / n;
    const double mine = value_of(world_.rank());
    double total = 0;
    for (int rank = 0; rank < n; ++rank) total += value_of(rank);
    const double share = static_cast<double>(n - 1) / n;
    switch (operation) {
      case Operation::all_reduce: {
        const at::Tensor data = tensor(count);
        return {data, mine,
                [=, this] { wait(world_.all_reduce(data, comm::ReduceOp::sum, options_)); },
                [=] { return mismatches(data, at::full_like(data, total)); }, 2 * share};
      }
      case Operation::all_gather: {
        const at::Tensor input = tensor(part);
        const at::Tensor output = tensor(count);
        return {input, mine, [=, this] { wait(world_.all_gather(output, input, options_)); },
                [=, this] { return mismatches(output, one_part_each(output)); }, share};
      }
      case Operation::reduce_scatter: {
        const at::Tensor input = tensor(count);
        const at::Tensor output = tensor(part);
        return {input, mine,
                [=, this] {
                  wait(world_.reduce_scatter(output, input, comm::ReduceOp::sum, options_));
                },
                [=] { return mismatches(output, at::full_like(output, total)); }, share};
      }
      case Operation::all_to_all: {
        const at::Tensor input = tensor(count);
        const at::Tensor output = tensor(count);
        return {input, mine, [=, this] { wait(world_.all_to_all(output, input, options_)); },
                [=, this] { return mismatches(output, one_part_each(output)); }, share};
      }
      case Operation::broadcast: {
        const at::Tensor data = tensor(count);
        return {data, mine, [=, this] { wait(world_.broadcast(data, 0, options_)); },
                [=, this] { return mismatches(data, at::full_like(data, value_of(0))); }, 1};
      }
      default: break;
    }
    LOCKSTEP_CHECK(false, "{} cannot be measured", comm::name(operation));
    return {};
  }

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(c10::elementSize(dtype_)); }

  // Microseconds of one call: the slowest rank's mean.
  double time(const Trial& trial, int iterations, int warmup) {
    for (int i = 0; i < warmup; ++i) trial.call();
    wait_for_device();
    world_.barrier(options_without_algorithm()).wait_on_host();
    const auto begin = Clock::now();
    for (int i = 0; i < iterations; ++i) trial.call();
    wait_for_device();
    const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
    at::Tensor mean = at::full({1}, taken.count() / iterations, of(at::kDouble));
    wait(world_.all_reduce(mean, comm::ReduceOp::max, options_without_algorithm()));
    return mean.item<double>();
  }

  // One more call tells how many results are wrong. The timed calls before it send only zeros, as
  // sums of sums would grow without end.
  std::int64_t total_wrong(const Trial& trial) {
    trial.given.fill_(trial.value);
    trial.call();
    at::Tensor wrong = at::full({1}, trial.wrong(), of(at::kLong));
    wait(world_.all_reduce(wrong, comm::ReduceOp::sum, options_without_algorithm()));
    return wrong.item<std::int64_t>();
  }

 private:
  // On a GPU calls follow each other without the host, as in training.
  void wait(comm::Work work) const {
    if (device_.is_cpu())
      work.wait_on_host();
    else
      work.wait();
  }
  void wait_for_device() const {
    if (!device_.is_cpu())
      c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  }

  static std::int64_t mismatches(const at::Tensor& found, const at::Tensor& wanted) {
    return found.ne(wanted).sum().item<std::int64_t>();
  }

  // Each rank puts in another number than its neighbours, so small that every dtype holds the sum
  // over 126 ranks.
  static double value_of(int rank) { return rank % 3 + 1; }

  // Part r has what rank r put in.
  at::Tensor one_part_each(const at::Tensor& like) const {
    at::Tensor wanted = at::empty_like(like);
    const std::int64_t part = like.numel() / world_.size();
    for (int rank = 0; rank < world_.size(); ++rank)
      wanted.narrow(0, rank * part, part).fill_(value_of(rank));
    return wanted;
  }
  comm::CallOptions options_without_algorithm() const { return {.launch = options_.launch}; }

  at::TensorOptions of(at::ScalarType dtype) const {
    return at::TensorOptions().dtype(dtype).device(device_);
  }

  at::Tensor tensor(std::int64_t count) {
    at::Tensor made =
        allocated_ ? world_.allocate({count}, dtype_) : at::empty({count}, of(dtype_));
    return made.zero_();
  }

  Communicator& world_;
  at::ScalarType dtype_;
  c10::Device device_;
  bool allocated_;
  comm::CallOptions options_;
};

void run(Communicator& world, c10::Device device, const Measurement& asked,
         const Settings& settings) {
  Bench bench(world, device, asked, settings);
  const bool speaks = world.rank() == 0;
  if (speaks && !settings.json)
    std::printf("# %d ranks over %s, %s, %d iterations after %d to warm up\n", world.size(),
                world.backend().c_str(), settings.dtype.c_str(), settings.iterations,
                settings.warmup);
  auto rows = nlohmann::json::array();
  for (const comm::Operation operation : asked.operations) {
    if (speaks && !settings.json)
      std::printf("#\n# %s\n#%11s %12s %9s %7s %5s %10s %8s %8s %7s\n#%11s %12s %9s %7s %5s %10s "
                  "%8s %8s\n",
                  comm::name(operation), "size", "count", "type", "redop", "root", "time", "algbw",
                  "busbw", "#wrong", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)");
    for (std::size_t bytes = asked.smallest; bytes <= asked.largest; bytes *= 2) {
      const std::int64_t part = std::max<std::int64_t>(
          static_cast<std::int64_t>(bytes) / bench.element_bytes() / world.size(), 1);
      const std::int64_t count = part * world.size();
      const Trial trial = bench.prepare(operation, count);
      const double time = bench.time(trial, settings.iterations, settings.warmup);
      const std::int64_t wrong = bench.total_wrong(trial);
      const auto moved = static_cast<double>(count * bench.element_bytes());
      const double algorithm_bandwidth = moved / time / 1e3;
      if (!speaks) continue;
      if (settings.json) {
        rows.push_back({{"operation", comm::name(operation)},
                        {"bytes", count * bench.element_bytes()},
                        {"elements", count},
                        {"dtype", settings.dtype},
                        {"time_us", time},
                        {"algbw_gb_s", algorithm_bandwidth},
                        {"busbw_gb_s", algorithm_bandwidth * trial.bus_factor},
                        {"wrong", wrong}});
      } else {
        std::printf("%12.0f %12lld %9s %7s %5d %10.2f %8.2f %8.2f %7lld\n", moved,
                    static_cast<long long>(count), settings.dtype.c_str(),
                    reduces(operation) ? "sum" : "none",
                    operation == comm::Operation::broadcast ? 0 : -1, time, algorithm_bandwidth,
                    algorithm_bandwidth * trial.bus_factor, static_cast<long long>(wrong));
        std::fflush(stdout);
      }
    }
  }
  if (!speaks || !settings.json) return;
  const std::string report = nlohmann::json{{"ranks", world.size()},
                                            {"backend", world.backend()},
                                            {"iterations", settings.iterations},
                                            {"results", rows}}
                                 .dump(2) +
                             "\n";
  if (settings.report_file.empty()) {
    std::printf("%s", report.c_str());
    return;
  }
  std::ofstream stream(settings.report_file);
  stream << report << std::flush;
  if (!stream) throw UsageError("the report cannot be written to {}", settings.report_file);
}

}  // namespace

int bench(Arguments arguments) {
  Settings settings;
  CLI::App app("Measures collectives and prints sizes, times, algorithm and bus bandwidth.",
               "lockstep bench");
  show_usage(app, "[FLAGS] collectives [FLAGS]");
  app.add_option("--op", settings.operations, "Collectives to measure (default: all)")
      ->delimiter(',');
  app.add_option("--nproc-per-node", settings.num_ranks,
                 "Ranks to start, where no launcher has (2)");
  app.add_option("--backend", settings.backend,
                 fmt::format("One of {}", fmt::join(comm::backends::names(), ", ")));
  app.add_option("--algorithm", settings.algorithm,
                 "automatic, direct, tree, ring, halving_doubling or hierarchical");
  app.add_option("--min", settings.smallest, "Smallest size (4K)");
  app.add_option("--max", settings.largest, "Largest size (64M)");
  app.add_option("--dtype", settings.dtype, "Element type (float32)");
  app.add_option("--device", settings.device, "cpu or cuda (nccl: cuda, others: cpu)");
  app.add_option("--iterations", settings.iterations, "Calls to time (20)");
  app.add_option("--warmup", settings.warmup, "Calls before that (5)");
  app.add_flag("--allocated", settings.allocated,
               "Use buffers that the backend reaches without a copy");
  app.add_flag("--json", settings.json, "Print JSON");
  app.add_option("--report", settings.report_file, "Write the JSON to this file (with --json)");
  SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, std::move(split.flags))) return 0;
  if (split.program.empty()) throw UsageError("say what to measure: 'lockstep bench collectives'");
  if (split.program.front() != "collectives")
    throw UsageError("there is nothing called '{}' to measure: say 'lockstep bench collectives'",
                     split.program.front());
  const Measurement asked = measurement_of(settings);
  if (!launched()) {
    if (comm::backends::is_started_by_mpirun(settings.backend))
      throw UsageError("mpirun starts the ranks of {}: mpirun -n {} lockstep bench collectives "
                       "--backend {}",
                       settings.backend, settings.num_ranks, settings.backend);
    if (!settings.json || !settings.report_file.empty())
      return relaunch("bench", arguments, settings.num_ranks);
    const Reported reported =
        report_from_ranks("bench", {arguments.begin(), arguments.end()}, settings.num_ranks);
    std::printf("%s", reported.text.c_str());
    return reported.exit_code;
  }
  at::set_num_threads(1);
  const c10::Device device = device_of_rank(asked);
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  const auto world = comm::join_world({.backend = settings.backend, .device = device});
  run(*world, device, asked, settings);
  return 0;
}

}  // namespace lockstep::cli

// `lockstep check`: what this machine and this set of ranks can do, and what is wrong with it.
#include <unistd.h>

#include <fstream>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/backends/table.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/device/device_manager.h>

#include <cli/flags.h>
#include <cli/torch/check/pairs.h>
#include <cli/torch/check/report.h>
#include <cli/torch/relaunch.h>

namespace lockstep::cli {

namespace {

struct Relaunched {
  int exit_code = 0;  // of the launcher; where it is not 0 there is no report, and it has said why
  inspection::Report report;
};

// Starts `lockstep run` with that many ranks, waits for it, and reads the report that rank 0 left:
// printed by a rank, its lines would carry the rank. Whoever ends this process ends the ranks too.
Relaunched check_with_ranks(int num_ranks, const std::string& backend) {
  const Reported reported = report_from_ranks("check", {"--backend", backend}, num_ranks);
  Relaunched result;
  result.exit_code = reported.exit_code;
  if (result.exit_code == 0) nlohmann::json::parse(reported.text).get_to(result.report);
  return result;
}

using namespace inspection;

constexpr milliseconds kTryTimeout{30'000};
constexpr milliseconds kJoinTimeout{120'000};

struct CheckFlags {
  std::string num_local_ranks, backend = "auto", report_file;
  bool json = false;
};

bool has_secret(const LaunchEnvironment& launch) {
  return launch.launcher != Launcher::torchrun || launch.secret_fd || !launch.secret_file.empty();
}

// Fills in what the ranks find out together. All get the same, but for `backends`, which rank 0
// has.
void inspect_ranks(comm::Communicator& world, const LaunchEnvironment& launch, Report& report) {
  const nlohmann::json own = {{"rank", describe_rank(launch)}, {"host", describe_host(launch)}};
  std::vector<Host> described;
  for (const std::string& text : gather_texts(world, own.dump())) {
    const nlohmann::json one = nlohmann::json::parse(text);
    report.ranks.push_back(one.at("rank").get<Rank>());
    described.push_back(one.at("host").get<Host>());
  }
  report.hosts = merge_hosts(report.ranks, described);
  if (world.size() == 1) return;
  report.backend = world.backend();
  report.pairs = measure_pairs(world, report.ranks, world.lane().empty() ? at::kCPU : at::kCUDA);
  report.num_pairs = std::int64_t{world.size()} * (world.size() - 1) / 2;
}

struct Inspection {
  Report report;  // whole on rank 0 only
  int rank = 0;
  bool can_train = true;  // rank 0's verdict, on every rank
};

Inspection inspect(const std::string& backend) {
  const LaunchEnvironment launch = read_launch_environment();
  Inspection inspection{.rank = launch.rank};
  Report& report = inspection.report;
  report.version = LOCKSTEP_VERSION;
  report.launcher = launcher_name(launch.launcher);
  report.has_secret = has_secret(launch);
  report.asked_backend = backend;
  // First of all: it forks.
  if (launch.rank == 0) report.backends = try_backends(Deadline::after(kTryTimeout));
  const c10::Device device =
      device::DeviceManager::auto_detect({.gpu_use = device::GpuUse::shared}).device();
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  const auto world =
      comm::join_world({.backend = backend, .device = device, .timeout = kJoinTimeout});
  inspect_ranks(*world, launch, report);
  if (launch.rank == 0) report.problems = find_problems(report);
  at::Tensor can_train = at::full({1}, report.can_train() ? 1 : 0, at::kInt);
  world->broadcast(can_train, 0).wait_on_host();
  inspection.can_train = can_train.item<int>() != 0;
  return inspection;
}

void write_report(const Report& report, const std::string& file) {
  std::ofstream stream(file);
  stream << nlohmann::json(report).dump() << std::flush;
  if (!stream) throw UsageError("the report cannot be written to {}", file);
}

void show(const Report& report, bool json) {
  const Style style = ::isatty(STDOUT_FILENO) == 1 && !environment_variable("NO_COLOR")
                          ? Style::terminal
                          : Style::plain;
  if (json) {
    nlohmann::json all = report;
    all["can_train"] = report.can_train();
    fmt::print("{}\n", all.dump(2));
  } else {
    fmt::print("{}", to_text(report, style));
  }
}

}  // namespace

int check(Arguments arguments) {
  CLI::App app("Tells what this machine and these ranks can do, and what is wrong.\n"
               "Exit status: 1 where something prevents training, 2 for a mistake in the command.",
               "lockstep check");
  CheckFlags flags;
  app.add_option("--nproc-per-node", flags.num_local_ranks,
                 "start this many ranks here and measure between them");
  app.add_option("--backend", flags.backend, "what the ranks talk over (auto)");
  app.add_flag("--json", flags.json, "everything, for programs");
  app.add_option("--report", flags.report_file,
                 "write the JSON to this file and exit with 0 in any case");
  app.footer(
      "Example: lockstep check --nproc-per-node 4\n"
      "lockstep check hang DIR tells what a job hangs on.\n"
      "On several hosts: lockstep run --nnodes 2 --rdzv-endpoint HOST:29500 ... lockstep check");
  if (!parse_flags(app, split_at_words(app, arguments, 0).flags)) return 0;

  comm::check_backend(flags.backend);
  if (!flags.num_local_ranks.empty()) {
    if (launched())
      throw UsageError("--nproc-per-node {}: these ranks have been started already (by {}); leave "
                       "the flag out",
                       flags.num_local_ranks, launcher_name(read_launch_environment().launcher));
    if (comm::backends::is_started_by_mpirun(flags.backend))
      throw UsageError("mpirun starts the ranks of {}: mpirun -n {} lockstep check --backend {}",
                       flags.backend, flags.num_local_ranks, flags.backend);
    const Relaunched result = check_with_ranks(
        parse_integer(flags.num_local_ranks, "--nproc-per-node", 1, kMostRanks), flags.backend);
    if (result.exit_code != 0) return result.exit_code;
    show(result.report, flags.json);
    return result.report.can_train() ? 0 : 1;
  }

  const Inspection inspection = inspect(flags.backend);
  if (!flags.report_file.empty()) {
    if (inspection.rank == 0) write_report(inspection.report, flags.report_file);
    return 0;
  }
  if (inspection.rank == 0) show(inspection.report, flags.json);
  return inspection.can_train ? 0 : 1;
}

}  // namespace lockstep::cli

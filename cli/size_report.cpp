#include <cli/size_report.h>

#include <lockstep/base/error.h>

#include <cli/flags.h>
#include <cli/num_ranks.h>

namespace lockstep::cli {

namespace {

constexpr int kMostRows = 64;

// "8", or "10 or 11" where shares differ.
std::string samples_of_a_rank(const train::BatchShares& shares) {
  const std::int64_t least = shares.batch.global / shares.num_data_ranks;
  if (shares.batch.global % shares.num_data_ranks == 0) return std::to_string(least);
  return fmt::format("{} or {}", least, least + 1);
}

}  // namespace

HostRange parse_host_range(const std::string& text) {
  const auto colon = text.find(':');
  HostRange hosts;
  hosts.least = parse_integer(text.substr(0, colon), "--nnodes", 1, kMostRanks);
  hosts.most = colon == std::string::npos
                   ? hosts.least
                   : parse_integer(text.substr(colon + 1), "--nnodes", 1, kMostRanks);
  if (hosts.least > hosts.most)
    throw UsageError("--nnodes {}: the least number of hosts comes first: give --nnodes {}:{}",
                     text, hosts.most, hosts.least);
  if (hosts.most - hosts.least >= kMostRows)
    throw UsageError("--nnodes {}: --describe shows up to {} numbers of hosts: give fewer", text,
                     kMostRows);
  return hosts;
}

std::string size_report(const train::TrainConfig& config, const train::ResolvedRun& run,
                        const HostRange& hosts, int ranks_per_host) {
  if (hosts.least == hosts.most) return "";
  // Where it has not begun, it is taken to begin there.
  const train::BegunBatch begun =
      run.begun.value_or(train::BegunBatch{.global = run.batch.global, .micro = run.most_micro});
  std::string text =
      fmt::format("\nThe run keeps its steps of {} samples when hosts leave and come:\n"
                  "hosts  ranks  samples of a rank  passes  of at most\n",
                  begun.global);
  for (int num_hosts = hosts.least; num_hosts <= hosts.most; ++num_hosts) {
    text += fmt::format("{:>5}  {:>5}  ", num_hosts, num_hosts * ranks_per_host);
    try {
      const train::BatchShares shares =
          train::share_batch(config, run.model, num_hosts * ranks_per_host, begun);
      text += fmt::format("{:>17}  {:>6}  {:>10}\n", samples_of_a_rank(shares),
                          shares.batch.accumulation, shares.batch.micro);
    } catch (const UsageError& error) {
      text += fmt::format("cannot be: {}\n", error.what());
    }
  }
  return text;
}

}  // namespace lockstep::cli

// A job on several hosts that a program starts by itself, in place of `lockstep run`:
//
//   int main(int argc, char** argv) {
//     lockstep::MultiNodeTrainingManager manager(
//         {.endpoint = "HOST0:29400", .secret_file = "job-secret", .max_restarts = 3});
//     manager.setup(/*num_nodes=*/2, /*gpus_per_node=*/8);
//     return manager.run(argc, argv, [](lockstep::DistributedManager dist) {
//       …  the training, on each of the 16 ranks …
//       return 0;
//     });
//   }
//
// Started once on every host, it meets the others at the endpoint and starts itself again as the
// ranks of its host; in a rank, run() joins the job and trains. docs/elastic.md says what becomes
// of hosts and ranks that fail, leave and come.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/distributed/config.h>
#include <lockstep/distributed/distributed.h>

namespace lockstep {

struct MultiNodeOptions {
  // HOST:PORT where the hosts meet, an address of the first; more of them, with commas, for hosts
  // that come when the first is lost. Needed for several nodes, as is the job's secret: a file that
  // only its owner can read, the same on all hosts.
  std::string endpoint = {};
  std::string secret_file = {};
  std::string run_id = "none";          // the job's name; all hosts must agree
  std::optional<int> node_rank = {};    // of this host; not given: in order of arrival
  std::optional<int> min_nodes = {};    // with which the job begins and goes on; not given: all
  int max_restarts = 0;                 // of its ranks, after failures
  int spares = 0;                       // processes of each host that stand by for lost ranks
  milliseconds timeout{300'000};        // for the hosts to meet
  milliseconds last_call{10'000};       // for more than min_nodes to come
  milliseconds stuck_after{0};          // a rank that reports no progress; 0: however long
  milliseconds interrupt_grace{2'000};  // for ranks to save what they have when they are to end
  // How ranks join each other.
  DistributedConfig distributed = {};
};

// Ownership: a value. Threading: one thread, which calls it at the start of main(). Failure:
// UsageError where the job cannot be as it is described; Error where hosts do not meet.
class MultiNodeTrainingManager {
 public:
  explicit MultiNodeTrainingManager(MultiNodeOptions options = {});

  // Every host has so many ranks: each with a GPU of its own, or on the CPU where hosts have none.
  // The same on all hosts, and in their ranks, where it must be what the job has.
  void setup(int num_nodes, int gpus_per_node);

  // Whether this process is one of the job's ranks, started by run(), launch() or any launcher that
  // setup_distributed() knows; if not, it is for starting them.
  bool is_rank() const;

  // "1 to 2 hosts of 8 ranks each, which meet at HOST0:29400; 3 restarts"
  std::string description() const;

  // For ranks: joins the job.
  DistributedManager join() const;

  // For hosts: starts a program and its arguments as the ranks of this one, and anew as options
  // say, and stays until the whole job has ended. Returns its exit code: 0, that of the first rank
  // that failed for good, or 128 + the signal that ended it. Signals that end this process end the
  // job.
  int launch(const std::vector<std::string>& program) const;

  // Both: launches this program, with the arguments that it has; in a rank, joins, trains and
  // returns what `train` does. That runs in keep_going(): where the job is formed anew, ranks that
  // are left call it again in the same process.
  int run(int argc, const char* const* argv,
          const std::function<int(DistributedManager)>& train) const;

 private:
  void check_set_up() const;
  int min_nodes() const { return options_.min_nodes.value_or(num_nodes_); }

  MultiNodeOptions options_;
  int num_nodes_ = 0;
  int gpus_per_node_ = 0;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::MultiNodeOptions;
using lockstep::MultiNodeTrainingManager;

}  // namespace lockstep::names

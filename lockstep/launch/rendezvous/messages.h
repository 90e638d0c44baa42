// The messages that the launchers of a job send each other: how one introduces itself, which rank
// runs where, what failed, and what becomes of the job. Each has an encode() that makes one line of
// text of it, and a decode() that throws where a text is something else.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/launcher_line.h>

namespace lockstep::launch {

// Throws the CommError of a rendezvous that fails.
[[noreturn]] void fail_rendezvous(Fault fault, const std::string& explanation);

// How a launcher introduces itself when it connects to another one.
struct Introduction {
  int node_rank = -1;  // the rank that it claims; -1: any free one
  int min_nodes = 1;
  int max_nodes = 1;
  int num_ranks = 1;
  std::string host;  // its name in messages
  std::string run_id;
  std::string address;  // "host:port" where it can be reached
  // The generation that it was last part of; -1: it is new to the job.
  int last_generation = -1;
  int last_node_rank = -1;
  int last_restarts = 0;  // restarts that had been used by then
  bool ready = true;      // all of its ranks have ended or left

  std::string encode() const;
  // Throws UsageError.
  static Introduction decode(const std::string& text);
};

// "3", or "2:4"
std::string node_range(int min_nodes, int max_nodes);

struct Node {
  std::string host;  // its name in messages
  int num_ranks = 1;
  std::string address;  // "host:port" where its launcher can be reached
};

// Which rank runs where: the outcome of a rendezvous, the same on every host. Ranks are numbered by
// node, without gaps; nodes may run different numbers of them. Each time the job is formed it gets
// a new table, with the next generation.
struct RankTable {
  std::vector<Node> nodes;
  int node_rank = 0;        // of the launcher that has this copy; node 0's is the leader
  std::string master_addr;  // where rank 0 may listen for torch.distributed's own store
  int master_port = 0;
  std::string store;  // "host:port" of the job's store; each generation has one of its own
  int generation = 0;
  int num_restarts = 0;  // how many of --max-restarts have been used so far
  int max_restarts = 0;

  int num_nodes() const { return static_cast<int>(nodes.size()); }
  const Node& here() const { return nodes[static_cast<std::size_t>(node_rank)]; }
  int num_local_ranks() const { return here().num_ranks; }
  int first_rank_of(int node) const {
    return std::accumulate(nodes.begin(), nodes.begin() + node, 0,
                           [](int sum, const Node& one) { return sum + one.num_ranks; });
  }
  int first_rank() const { return first_rank_of(node_rank); }
  int world_size() const { return first_rank_of(num_nodes()); }

  std::string encode() const;
  // Throws CommError (corrupted).
  static RankTable decode(const std::string& text);
};

// Why a generation ended before its time.
struct Failure {
  enum class Kind {
    exit,         // a rank ended with an exit code other than 0
    signal,       // a rank was ended by a signal
    spawn,        // a rank could not be started
    node_lost,    // a host's launcher died or cannot be reached
    interrupted,  // a launcher was told to end by a signal
    too_few,      // fewer nodes are left than the job needs to be formed again
    stopped,      // a rank is stopped, by SIGSTOP or a terminal
    stuck,        // a rank reports no progress any more
  };
  enum class Aftermath { ended, restarted };  // what became of the job

  Kind kind = Kind::exit;
  int rank = -1;  // -1 where a whole host failed
  int local_rank = -1;
  int node_rank = 0;
  std::string host;
  int pid = 0;
  int exit_code = 1;  // the job's exit code: the rank's own, or 128 + signal
  int signal = 0;
  int generation = 0;      // in which it happened
  bool final = false;      // the rank has said that a restart would not help
  Blame blame;             // the ranks whose loss made it fail, as it has said
  std::int64_t step = -1;  // the last step that a stuck rank reported
  // The system's error, how long a rank has been stuck, or what became of the blamed ranks.
  std::string detail;
  std::vector<std::string> last_lines;    // of the rank's output
  std::vector<std::string> output_files;  // files on its host that have all of it

  // One sentence for a person.
  std::string sentence() const;

  // `lockstep: fault {...}`: one line for a program that watches.
  std::string machine_line(Aftermath aftermath = Aftermath::ended) const;

  std::string encode() const;
  // Throws UsageError.
  static Failure decode(const std::string& text);

 private:
  std::string because() const;
};

// The index of the failure that the others followed. `failures` are ranks that ended by themselves,
// in the order in which the launcher heard of them. A rank that blames nobody comes before all that
// do; among those that blame nobody, one that others blame comes first. Where everybody blames
// somebody, a chain of blame is followed to its end. Ties go to the failure that was heard first.
std::size_t first_of(const std::vector<Failure>& failures);

// Whether the user already knows why: a rank that ends with one of these codes has explained itself
// before, and so has an interrupted job with such codes.
bool explained(const Failure& failure, const std::vector<int>& exit_codes);

// Whether starting the ranks again may help. It does not where a user ended the job, where the
// program cannot be started, or where the rank has said that it would only fail again.
bool worth_a_restart(const Failure& failure);

// "SIGKILL"
std::string signal_name(int signal);

// The leader's decision, for all hosts, on a generation that cannot go on as it is.
struct Decision {
  enum class Action {
    end,      // the whole job ends
    restart,  // the ranks end, and the job is formed again
    grow,     // the same, because nodes have joined
  };

  Action action = Action::end;
  std::optional<Failure> failure;  // the first one; empty where the job grows
  std::string reason;              // a sentence that says why the job grows

  std::string encode() const;
  // Throws UsageError.
  static Decision decode(const std::string& text);
};

}  // namespace lockstep::launch

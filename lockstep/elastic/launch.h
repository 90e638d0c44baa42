// `lockstep run` as a function.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/program.h>
#include <lockstep/elastic/rank_streams.h>
#include <lockstep/net/address.h>

namespace lockstep::elastic {

enum class Binding { none, core };

struct LaunchOptions {
  std::vector<std::string> program;  // and its arguments
  ProgramKind program_kind = ProgramKind::automatic;
  int num_local_ranks = 1;
  // Processes that stand by on this host, to take the place of ranks that are lost.
  int num_spares = 0;
  int min_nodes = 1;
  int max_nodes = 1;
  std::optional<int> node_rank;  // unset: by order of arrival
  Rendezvous rendezvous = Rendezvous::embedded;
  // Where the launchers meet: at the first; or the members of etcd. Needed for several nodes.
  std::vector<net::Address> endpoints;
  std::string master_addr;         // empty: the endpoint's host, 127.0.0.1 for one node
  std::optional<int> master_port;  // for the ranks of a single node; unset: one that is free
  std::string local_addr;          // this host's name in messages; empty: its host name
  std::string run_id = "none";
  std::string role = "default";
  std::string secret_file;  // needed for several nodes
  Binding binding = Binding::core;
  milliseconds timeout{300'000};   // for the launchers to meet
  milliseconds last_call{10'000};  // for more than min_nodes to come
  int max_restarts = 0;
  // A rank that has reported progress (base/progress.h) and then none for so long has failed; zero:
  // however long.
  milliseconds stuck_after{0};
  // For ranks that stay through a failure elsewhere (distributed/keep_going.h) to leave what they
  // were doing; whoever takes longer is started anew.
  milliseconds leave_within{30'000};
  // Between SIGTERM and SIGKILL: after a failure, and where a user ends the job or nodes join it.
  milliseconds grace{400};
  milliseconds interrupt_grace{2000};
  std::string log_directory;
  StreamChoices streams;
  // Ranks that end with one of these have told their user why: the launcher adds nothing. Where
  // there are any, ranks also say themselves what came of an interruption.
  std::vector<int> explained_exit_codes;
  // Said when the user's first signal is passed on; empty: nothing.
  std::string interruption_note;
};

// Starts the ranks of this host, anew where a failure leaves a restart or nodes come, and stays
// until the whole job has ended. Returns its exit code: 0, that of the first rank that failed for
// good, or 128 + the signal that ended it. Takes over the process: its signals, its children and
// its output. Must be called before the process has threads. Throws UsageError and CommError where
// the job could not begin.
int launch(const LaunchOptions& options);

}  // namespace lockstep::elastic

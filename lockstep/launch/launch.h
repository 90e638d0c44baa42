// `lockstep run` as a function.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/processes/output.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/launch/rendezvous/rendezvous.h>
#include <lockstep/net/address.h>

namespace lockstep::launch {

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
  // The launchers meet at the first of these, or these are the members of etcd. Needed for several
  // nodes.
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
  // A rank that has reported progress (launch/rank_side/report.h) and then none for so long has
  // failed; zero: never.
  milliseconds stuck_after{0};
  // How long ranks that stay through a failure elsewhere (recovery/keep_going.h) may take to
  // leave what they were doing; a rank that takes longer is started again.
  milliseconds leave_within{30'000};
  // Between SIGTERM and SIGKILL: after a failure, and where a user ends the job or nodes join it.
  milliseconds grace{400};
  milliseconds interrupt_grace{2000};
  std::string log_directory;
  StreamChoices streams;
  // Ranks that end with one of these have told their user why: the launcher adds nothing. Ranks of
  // a program with such codes also report the outcome of an interruption.
  std::vector<int> explained_exit_codes;
  // Said when the user's first signal is passed on; empty: nothing.
  std::string interruption_note;
};

// Starts the ranks of this host, again where a failure leaves a restart or nodes come, and returns
// when the whole job has ended, with its exit code: 0, the first failed rank's, or 128 + the signal
// that ended it. Takes over the process: its signals, its children and its output. Must be called
// before the process has threads. Throws UsageError and CommError where the job could not begin.
int launch(const LaunchOptions& options);

}  // namespace lockstep::launch

// The agent of one host: watches its ranks of one generation from the first to the last.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/failure.h>
#include <lockstep/elastic/guardian.h>
#include <lockstep/elastic/layout.h>
#include <lockstep/elastic/output.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/elastic/rank_watch.h>

namespace lockstep::elastic {

// Everything the agent reads of a rank.
struct RankOutput {
  std::unique_ptr<Tail> tail = std::make_unique<Tail>();
  std::vector<RankStream> streams;
};

// Runs the loop of the launcher: hands on output, hears how ranks end, hears from other launchers
// and from the user (signals), and when something fails brings everything on this host to an end.
// One thread; borrows what it is given. `signals` is a signalfd.
class Agent {
 public:
  struct Options {
    milliseconds grace{0};                  // between SIGTERM and SIGKILL after a failure
    milliseconds interrupt_grace{0};        // the same where a user ends the job, or nodes join it
    std::vector<int> explained_exit_codes;  // nothing is said of ranks that end so
    std::string interruption_note;          // said at the user's first signal; empty: nothing
    milliseconds stuck_after{0};            // without progress; zero: however long
    std::string flight_directory;           // where ranks leave dumps
  };

  // What `peers` points to may change meanwhile: see Peers::successor().
  Agent(const Layout& layout, Guardian& guardian, std::unique_ptr<Peers>& peers,
        std::vector<RankOutput>& outputs, std::array<Sink*, 2> sinks, int signals,
        const ProgressPage& progress, Options options);

  // Until every rank of this host, and all they started, are gone, and the whole job is over or is
  // to be formed anew.
  void run();

  // Where not even ranks can be started here any more.
  bool guardian_lost() const { return guardian_.gone(); }

 private:
  // How far the end has come. Each stage but the first and last has a deadline.
  enum class Stage {
    running,
    noticing,     // something failed: other ranks may find out by themselves and say what they saw
    interrupted,  // SIGINT was passed on
    terminated,   // SIGTERM was sent
    killed,       // the guardian ends everything
    ended,
  };

  void wait();  // and reads what ranks have written
  void hear_guardian();
  void hear_user();
  void hear_signal(int signal);
  void watch_ranks();
  void say_whom_it_waits_for();
  std::string name_of(int local_rank) const;
  void advance();
  void stop_as_decided();
  void end_politely();
  void enter(Stage stage, milliseconds span);
  void fail(const Failure& failure);
  void drain(int local_rank);
  bool streams_open() const;
  bool finished() const;
  Failure failure_of(int local_rank, Failure::Kind kind);

  const Layout& layout_;
  Guardian& guardian_;
  std::unique_ptr<Peers>& peers_;
  std::vector<RankOutput>& outputs_;
  std::array<Sink*, 2> sinks_;
  int signals_;
  Options options_;
  Stage stage_ = Stage::running;
  Deadline stage_deadline_;
  Clock::time_point stage_since_;
  bool told_waiting_ = false;  // whom for, in this stage
  RankWatch watch_;
  std::vector<int> pids_;  // by local rank; 0 for those that do not run
  int num_running_;
  bool told_done_ = false;
  bool interrupted_ = false;  // by this host's user
  bool told_lost_ = false;
  bool impatient_ = false;           // the user interrupted when only output was left
  Clock::time_point last_progress_;  // of the sinks
};

}  // namespace lockstep::elastic

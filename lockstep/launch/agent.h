// The agent of one host: watches the host's ranks of one generation from the first to the last.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/processes/guardian.h>
#include <lockstep/launch/processes/output.h>
#include <lockstep/launch/processes/rank_processes.h>
#include <lockstep/launch/processes/rank_watch.h>
#include <lockstep/launch/rendezvous/rendezvous.h>

namespace lockstep::launch {

// Runs the loop of the launcher. It shows output, notices how ranks end, and listens to other
// launchers and to the user (signals). When something fails it ends the generation on this host: it
// asks ranks that stay to leave it, and ends all others. One thread; borrows its arguments.
// `signals` is a signalfd.
class Agent {
 public:
  struct Options {
    milliseconds grace{0};                  // between SIGTERM and SIGKILL after a failure
    milliseconds interrupt_grace{0};        // the same where a user ends the job, or nodes join it
    std::vector<int> explained_exit_codes;  // nothing is said of ranks that end with these
    std::string interruption_note;          // said at the user's first signal; empty: nothing
    milliseconds stuck_after{0};            // without progress; zero: never
    milliseconds leave_within{0};           // for ranks that stay, when a generation is over
    std::string flight_directory;           // where ranks leave dumps
    // Gives a rank whose process could not be told its place another process.
    std::function<void(int local_rank)> give_place;
    std::function<void()> tend_spares;  // called now and then while ranks run
  };

  // Replaces the object in `peers` by its successor, where it has one.
  Agent(const RankTable& table, Guardian& guardian, std::unique_ptr<Peers>& peers,
        RankProcesses& processes, std::array<Sink*, 2> sinks, int signals,
        const ProgressPage& progress, Options options);

  // Returns when every rank of this host has ended, with all it started, or has left the
  // generation, and the whole job is over or is to be formed again.
  void run();

  // True where this host cannot even start ranks any more.
  bool guardian_lost() const { return guardian_.gone(); }

 private:
  // Other ranks notice a lost one within 0.2 s, and need that long to leave a dump of where they
  // were. Together with the default grace, a job ends well within a second.
  static constexpr milliseconds kNoticing{250};
  // SIGKILL takes this long only where the kernel holds a process.
  static constexpr milliseconds kKilling{6000};
  // A reader that takes nothing for so long does not hold up the end of a job that failed.
  static constexpr milliseconds kStuckReader{1000};

  // How far the end has come. Each stage but the first and last has a deadline.
  enum class Stage {
    running,
    noticing,     // something failed: other ranks may find out by themselves and say what they saw
    interrupted,  // SIGINT was passed on
    terminated,   // SIGTERM was sent
    leaving,      // only ranks that stay are left, and have not left the generation yet
    killed,       // the guardian ends everything, or what ended processes left behind
    ended,
  };

  void wait();  // and reads what ranks have written
  void handle_guardian();
  void handle_end(int slot, int status);
  Failure failure_of_host(Failure::Kind kind) const;
  Failure failure_of(RankProcess& process, Failure::Kind kind);
  Failure failure_of_end(RankProcess& process, int status);
  void read_line(RankProcess& process);
  void handle_signals();
  void handle_signal(int signal);
  void pause();
  void follow_pause();
  void watch_ranks();
  void handle(const RankWatch::Finding& finding);
  void say_whom_it_waits_for();
  std::string name_of(const RankProcess& process) const;
  void say(const std::string& line) { sinks_[1]->append("lockstep: " + line + "\n"); }
  void find_first_failure();
  bool cause_may_turn_up(const Failure& first);
  void advance();
  void advance_stage();
  void stop_as_decided();
  void end_politely();
  const char* ending_the_others(const Failure& failure) const;
  bool goes_on() const;
  void ask_to_leave();
  bool has_to_end(const RankProcess& process) const;
  bool has_to_leave(const RankProcess& process) const;
  int num_to_end() const;
  int num_to_leave() const;
  void signal_ranks_to_end(int signal);
  void end_ranks_that_did_not_leave();
  void clear_up();
  void enter(Stage stage, milliseconds span);
  void fail(const Failure& failure);
  void say_further_failures();
  bool streams_open() const;
  bool finished() const;

  const RankTable& table_;
  Guardian& guardian_;
  std::unique_ptr<Peers>& peers_;
  RankProcesses& processes_;
  std::array<Sink*, 2> sinks_;
  int signals_;
  Options options_;
  Stage stage_ = Stage::running;
  Deadline stage_deadline_ = Deadline::never();
  Clock::time_point stage_since_ = Clock::now();
  bool told_waiting_ = false;  // for whom, in this stage
  RankWatch watch_;
  bool asked_to_leave_ = false;  // ranks that stay, at the end of a step or at once
  bool told_to_leave_ = false;   // at once
  // Ranks that ended by themselves, perhaps because another is gone, and until when that other one
  // may turn up.
  std::vector<Failure> suspects_;
  Deadline suspect_until_ = Deadline::never();
  Deadline cause_ends_by_ = Deadline::never();  // at the latest
  // Ranks that failed when the generation was already over, until it is decided what becomes of it.
  std::vector<Failure> further_failures_;
  bool told_done_ = false;
  bool interrupted_ = false;  // by this host's user
  bool told_lost_ = false;
  bool held_ = false;       // ranks are stopped, because a user has paused the job
  bool impatient_ = false;  // the user interrupted when only output was left
  Clock::time_point last_progress_ = Clock::now();  // of the sinks
};

}  // namespace lockstep::launch

// The agent of one host: watches its ranks of one generation from the first to the last.
#pragma once

#include <array>
#include <functional>
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
#include <lockstep/elastic/processes.h>
#include <lockstep/elastic/rank_watch.h>

namespace lockstep::elastic {

// Runs the loop of the launcher: hands on output, hears how ranks end, hears from other launchers
// and from the user (signals), and when something fails brings the generation to an end on this
// host: ranks that stay are asked to leave it, all others are ended. One thread; borrows what it is
// given. `signals` is a signalfd.
class Agent {
 public:
  struct Options {
    milliseconds grace{0};                  // between SIGTERM and SIGKILL after a failure
    milliseconds interrupt_grace{0};        // the same where a user ends the job, or nodes join it
    std::vector<int> explained_exit_codes;  // nothing is said of ranks that end so
    std::string interruption_note;          // said at the user's first signal; empty: nothing
    milliseconds stuck_after{0};            // without progress; zero: however long
    milliseconds leave_within{0};           // for ranks that stay, when a generation is over
    std::string flight_directory;           // where ranks leave dumps
    // To a rank whose process could not be told its own.
    std::function<void(int local_rank)> give_place;
    std::function<void()> tend_spares;  // called now and then while ranks run
  };

  // What `peers` points to may change meanwhile: see Peers::successor().
  Agent(const Layout& layout, Guardian& guardian, std::unique_ptr<Peers>& peers,
        Processes& processes, std::array<Sink*, 2> sinks, int signals, const ProgressPage& progress,
        Options options);

  // Until every rank of this host has ended, with all it started, or has left the generation, and
  // the whole job is over or is to be formed anew.
  void run();

  // Where not even ranks can be started here any more.
  bool guardian_lost() const { return guardian_.gone(); }

 private:
  // A lost peer is noticed by the others within 0.2 s; they need that long to leave word of where
  // they were. Together with the default grace, a job ends well within a second.
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
    leaving,      // only those are left that stay, and have not left the generation yet
    killed,       // the guardian ends everything, or what those have left that have ended
    ended,
  };

  void wait();  // and reads what ranks have written
  void hear_guardian();
  void hear_end(int slot, int status);
  Failure failure_of_end(RankProcess& process, int status);
  void hear_ranks();
  void hear_rank(RankProcess& process);
  void hear_user();
  void hear_signal(int signal);
  void stand_still();
  void follow_pause();
  void watch_ranks();
  void say_whom_it_waits_for();
  std::string name_of(const RankProcess& process) const;
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
  void signal_those_that_end(int signal);
  void end_those_that_did_not_leave();
  void clear_up();
  void enter(Stage stage, milliseconds span);
  void fail(const Failure& failure);
  void say_further_failures();
  bool streams_open() const;
  bool finished() const;
  Failure failure_of(RankProcess& process, Failure::Kind kind);

  const Layout& layout_;
  Guardian& guardian_;
  std::unique_ptr<Peers>& peers_;
  Processes& processes_;
  std::array<Sink*, 2> sinks_;
  int signals_;
  Options options_;
  Stage stage_ = Stage::running;
  Deadline stage_deadline_;
  Clock::time_point stage_since_;
  bool told_waiting_ = false;  // whom for, in this stage
  RankWatch watch_;
  bool asked_to_leave_ = false;  // those that stay: at the end of a step, or at once
  // Ranks that ended by themselves, perhaps because another is gone, and until when that one may
  // turn up.
  std::vector<Failure> suspects_;
  Deadline suspect_until_;
  Deadline cause_ends_by_;  // at the latest
  // Of ranks that were lost when the generation was over already, until it is decided what becomes
  // of it.
  std::vector<Failure> further_failures_;
  bool told_to_leave_ = false;  // at once
  bool told_done_ = false;
  bool interrupted_ = false;  // by this host's user
  bool told_lost_ = false;
  bool held_ = false;                // ranks are stopped, because a user has the job stand still
  bool impatient_ = false;           // the user interrupted when only output was left
  Clock::time_point last_progress_;  // of the sinks
};

}  // namespace lockstep::elastic

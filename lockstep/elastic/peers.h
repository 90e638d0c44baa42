// What the launchers of a job tell each other, before it runs and while it does.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/decision.h>
#include <lockstep/elastic/failure.h>
#include <lockstep/elastic/layout.h>

namespace lockstep::elastic {

// A launcher's way to the others. The launcher of node 0 is the hub: it gathers the launchers and
// numbers them, hears of every failure, decides which was the first and what becomes of the job,
// and passes that on, so that all hosts do and report the same. A launcher that dies is known by
// its connection closing, one that hangs or is cut off by its silence. Hub and Member are the two
// kinds; when node 0 is lost, a Member may become a Hub.
//
// A generation goes so: next_layout() gives its layout; ranks run; either all_done() becomes true,
// or decision() says what becomes of them; unless that is the end, each launcher ends its ranks and
// says so with announce_ready(), and next_layout() gives the next. Not thread-safe; the caller
// polls.
class Peers {
 public:
  static constexpr milliseconds kBeat{250};
  static constexpr milliseconds kLongestSilence{4000};

  virtual ~Peers() = default;

  // Descriptors to poll for input.
  virtual void add_to(std::vector<pollfd>& polled) const = 0;

  // Reads what has arrived, says that this launcher is alive, notices silence. To be called at
  // least every kBeat. CommError where the launchers cannot meet for the first time.
  virtual void attend() = 0;

  // A failure on this host; the first one of a generation wins. But an interruption by the user, or
  // a rank's word that a restart would not help it, also ends a job that was about to be formed
  // anew.
  virtual void announce(const Failure& failure) = 0;

  // All ranks of this host have ended well.
  virtual void announce_done() = 0;

  // All ranks of this host have ended, as the decision asks for.
  virtual void announce_ready() = 0;

  // The user of this host has the job stand still (Ctrl-Z), and go on again: paused() follows on
  // all hosts. A launcher that stands still itself in between is not taken for lost. False where
  // that cannot be: etcd would take it for lost.
  virtual bool announce_pause() = 0;
  virtual void announce_resume() = 0;

  // What takes the place of this one from now on; null where nothing does. To be asked after every
  // attend().
  virtual std::unique_ptr<Peers> successor() { return nullptr; }

  // Handed out once for each generation.
  std::optional<Layout> next_layout();

  // The first failure of this generation, as far as it is known here.
  const std::optional<Failure>& failure() const { return failure_; }

  // What node 0 made of it, or what can no longer become otherwise.
  const std::optional<Decision>& decision() const { return decision_; }

  // Whether the ranks of all hosts are to stand still.
  bool paused() const { return paused_; }

  // True once the ranks of all hosts have ended well.
  bool all_done() const { return all_done_; }

 protected:
  void begin(const Layout& layout);  // a generation

  std::optional<Layout> next_;
  std::optional<Failure> failure_;
  std::optional<Decision> decision_;
  bool paused_ = false;
  bool all_done_ = false;
};

}  // namespace lockstep::elastic

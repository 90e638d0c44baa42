// What the launchers of a job tell each other while it runs.
#pragma once

#include <poll.h>

#include <optional>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/failure.h>
#include <lockstep/elastic/layout.h>

namespace lockstep::elastic {

// The launcher of node 0 is the hub: it hears of every failure, decides which was the first and
// passes that on, so that all hosts report the same. A launcher that dies is known by its
// connection closing, one that hangs or is cut off by its silence. With a single node there is
// nobody to talk to, and the first failure is simply the first. Not thread-safe; the caller polls.
class Peers {
 public:
  static constexpr milliseconds kBeat{1000};
  static constexpr milliseconds kLongestSilence{4000};

  Peers(const Layout& layout, std::vector<Channel> channels);

  // Descriptors to poll for input.
  void add_to(std::vector<pollfd>& polled) const;

  // Reads what has arrived, says that this launcher is alive, notices silence.
  void attend();

  // A failure on this host; the first one of the job wins.
  void announce(const Failure& failure);

  // All ranks of this host have ended well.
  void announce_done();

  // The job's first failure, as far as it is known here.
  const std::optional<Failure>& failure() const { return failure_; }

  // True once that is the hub's word, or can no longer become it.
  bool settled() const;

  // True once the ranks of all hosts have ended well.
  bool all_done() const { return all_done_; }

 private:
  bool hub() const { return node_rank_ == 0; }
  int node_of(std::size_t channel) const { return hub() ? static_cast<int>(channel) : 0; }
  void hear(std::size_t index, const Channel::Message& message);
  void lose(std::size_t index, const std::string& how);
  void decide(const Failure& failure);
  void tell_all(const std::string& word, const std::string& text);
  void check_done();

  const Layout& layout_;
  int node_rank_;
  std::vector<Channel> channels_;  // as in Membership
  std::vector<bool> done_;         // by node rank; the hub's
  Clock::time_point next_beat_;
  std::optional<Failure> failure_;
  bool confirmed_ = false;
  bool all_done_ = false;
};

}  // namespace lockstep::elastic

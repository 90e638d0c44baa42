// The rendezvous: how the launchers of a job's hosts find each other, and the messages between them
// from then on.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rendezvous/messages.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>

namespace lockstep::launch {

// Where it is settled which launcher leads.
enum class Rendezvous {
  embedded,  // among the launchers themselves, which meet at the first endpoint
  etcd,      // in etcd, whose members are the endpoints
};

// A launcher's own facts, and the terms of the job, on which all launchers must agree.
struct RendezvousOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  std::optional<int> node_rank;  // unset: by order of arrival
  int num_local_ranks = 1;
  std::string host;  // this host's name in messages
  std::string run_id;
  Rendezvous rendezvous = Rendezvous::embedded;
  // Embedded: node 0 is at the first; port 0 only for a single node.
  std::vector<net::Address> endpoints;
  std::string local_addr;  // this host's, where others reach it; empty: the one that leads to etcd
  std::string master_addr;
  int master_port = 0;  // 0: one that is free
  milliseconds timeout{0};
  milliseconds last_call{0};   // how long to wait for more than min_nodes after the last arrival
  milliseconds leave_soon{0};  // how long ranks may take to complete a step when nodes join

  // Whether more launchers may join while the job runs.
  bool elastic() const { return min_nodes < max_nodes || (max_nodes > 1 && max_restarts > 0); }

  // `address` is where others can reach this launcher; it may be empty.
  Introduction introduction(const std::string& address) const;
};

// A launcher's view of the others. The launcher of node 0 is the leader: it gathers the launchers
// and numbers them, hears of every failure, decides which was the first and what becomes of the
// job, and passes that on, so that all hosts do and report the same. A launcher that dies is known
// by its connection closing, one that hangs or is cut off by its silence. Leader and Follower are
// the two kinds; when the leader is lost, a Follower may become the Leader.
//
// The course of a generation: next_table() gives its table; ranks run; either all_done() becomes
// true, or decision() says what becomes of them; unless that is the end, each launcher ends its
// ranks and says so with announce_ready(), and next_table() gives the next. Not thread-safe; the
// caller polls.
class Peers {
 public:
  static constexpr milliseconds kBeat{250};
  static constexpr milliseconds kLongestSilence{4000};

  virtual ~Peers() = default;

  // Descriptors to poll for input.
  virtual void add_to(std::vector<pollfd>& polled) const = 0;

  // Reads new messages, tells the others that this launcher is alive, and notices their silence.
  // Call it at least every kBeat. CommError where the first rendezvous fails.
  virtual void attend() = 0;

  // A failure on this host. The first one of a generation wins, with two exceptions: an
  // interruption by the user, and a rank's word that a restart would not help it, also end a job
  // that was about to be formed again.
  virtual void announce(const Failure& failure) = 0;

  // All ranks of this host have ended well.
  virtual void announce_done() = 0;

  // All ranks of this host have ended or left, as the decision asks for.
  virtual void announce_ready() = 0;

  // The user of this host pauses the job (Ctrl-Z) and resumes it: paused() follows on all hosts. A
  // launcher that is stopped itself in between does not count as lost. False where the job cannot
  // be paused: etcd would take this launcher for lost.
  virtual bool announce_pause() = 0;
  virtual void announce_resume() = 0;

  // The object that replaces this one from now on; null where none does. To be asked after every
  // attend().
  virtual std::unique_ptr<Peers> successor() { return nullptr; }

  // Given out once for each generation.
  std::optional<RankTable> next_table();

  // The first failure of this generation, as far as this launcher knows.
  const std::optional<Failure>& failure() const { return failure_; }

  // The leader's decision on this generation, or one that nothing can change any more.
  const std::optional<Decision>& decision() const { return decision_; }

  // Whether the ranks of all hosts are to be stopped.
  bool paused() const { return paused_; }

  // True once the ranks of all hosts have ended well.
  bool all_done() const { return all_done_; }

 protected:
  void begin(const RankTable& table);  // a generation

  std::optional<RankTable> next_;
  std::optional<Failure> failure_;
  std::optional<Decision> decision_;
  bool paused_ = false;
  bool all_done_ = false;
};

// Joins the job or begins it.
//
// Embedded: the leader listens at the first of the endpoints that all launchers were told. The
// others connect to it, introduce themselves, and get the table once enough have come. The
// connections stay open: a launcher learns from them that another one failed. Ranks find each other
// in a store that the leader runs, at a port of its own for each generation. Where restarts are
// left, the others listen too, for the day that the leader is lost: at one of the other endpoints,
// where that is on their host, otherwise at any port.
//
// etcd: the launcher that comes first is elected, unless it claims a node rank other than 0; the
// others learn from etcd where it listens.
//
// UsageError where an address is not this host's or is taken; CommError where etcd or the leader
// does not answer in time, or the secret differs.
std::unique_ptr<Peers> join_job(const RendezvousOptions& options, const net::Secret& secret);

}  // namespace lockstep::launch

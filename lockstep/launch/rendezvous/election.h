// The election of the leader of a job, through etcd.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/launch/rendezvous/etcd.h>
#include <lockstep/net/address.h>

namespace lockstep::launch {

// One launcher's part in the election. Two keys hold the outcome: `lockstep/JOB/leader`, where the
// leader can be reached, lasts as long as the leader renews its lease; `lockstep/JOB/term` counts
// the terms. A launcher becomes the leader by one transaction, which needs the first key to be free
// and the second to be as it was read, so that there are never two. The leader counts its lease
// from before it asked for it, and so stops before etcd lets another launcher in, however long it
// was stopped itself. Only an address and two numbers are kept there, and none of them is trusted:
// launchers prove to each other that they know the job's secret.
//
// Owns a thread, which talks to etcd. Thread-safe. Where etcd does not answer, that is logged when
// it begins and when it ends; nothing is thrown.
class Election {
 public:
  enum class Wish {
    idle,                      // to know nothing
    observe,                   // to know who leads
    campaign,                  // to lead where nobody does
    campaign_after_survivors,  // the same, but after those who were of the job under its last
                               // leader
  };
  enum class Leadership {
    unknown,   // etcd has not answered since the wish
    vacant,    // nobody leads
    others,    // another launcher leads
    ours,      // this launcher leads
    doubtful,  // this launcher led, and etcd has not said since for how much longer
    lost,      // this launcher led, and another leads now or has led since
  };
  struct Status {
    Leadership leadership = Leadership::unknown;
    net::Address leader;        // where another one leads
    std::int64_t term = 0;      // the leader's, while there is one
    std::uint64_t answers = 0;  // how many etcd has given
    std::string trouble;        // why etcd does not answer; empty where it does
  };

  // The wish of a launcher that is of no job yet and claims this node rank: only node 0 may lead.
  static Wish wish_of_newcomer(std::optional<int> node_rank) {
    return node_rank.value_or(0) == 0 ? Wish::campaign_after_survivors : Wish::observe;
  }

  // How long a leadership outlasts its holder.
  static constexpr milliseconds kLease{4000};

  // `own` is where others can reach this launcher.
  Election(std::vector<net::Address> members, const std::string& job, const net::Address& own);

  // Resigns where this launcher leads: the job has ended.
  ~Election();
  Election(const Election&) = delete;
  Election& operator=(const Election&) = delete;

  // Sets the wish, and forgets earlier results. A launcher with a wish does not act as the leader;
  // if it has been elected meanwhile, it resigns.
  void wish(Wish wish);

  Status status() const;

  // Asks etcd to confirm now that this launcher still leads. To be called before a generation is
  // formed, which may be once `confirmed` returns its number.
  void confirm(int generation);
  std::optional<int> confirmed() const;

  // Where etcd is, and the key that names the leader, for messages.
  std::string where() const { return etcd_.members(); }
  const std::string& key() const { return leader_key_; }

 private:
  void run(const std::stop_token& stop);
  void step();
  void renew();
  void look();
  void judge(const std::vector<Etcd::Value>& values);
  bool campaign(const Etcd::Value& term);
  void give_up();
  void lead(std::int64_t created, std::int64_t term, Clock::time_point until);
  void note_trouble(const std::string& what);
  std::string own_text() const;
  void resign();

  const std::string leader_key_, term_key_;
  const net::Address own_;

  // Only the thread uses these.
  Etcd etcd_;
  Etcd::Lease lease_;
  Clock::time_point lease_until_;  // at the earliest
  std::int64_t created_ = 0;       // the revision at which our key was made
  std::optional<Clock::time_point> vacant_since_;
  bool seen_leader_ = false;  // since the wish

  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable_any changed_;
  Wish wish_ = Wish::idle;
  std::uint64_t num_wishes_ = 0;
  Status status_;
  Clock::time_point ours_until_;
  int to_confirm_ = -1;
  std::optional<int> confirmed_;
  bool unwanted_ = false;  // the thread has won an election that is no longer wished for
  int num_failures_ = 0;   // since etcd last answered
  bool urgent_ = false;    // the thread is not to wait

  std::jthread thread_;
};

}  // namespace lockstep::launch

// Which launcher of a job is node 0's, settled in etcd.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/etcd.h>
#include <lockstep/net/address.h>

namespace lockstep::elastic {

// A launcher's part in it. Two keys hold the outcome: `lockstep/JOB/hub`, where node 0's launcher
// can be reached, lasts as long as that launcher renews its lease; `lockstep/JOB/term` counts how
// often the office was taken. Taking it is one transaction, which needs the first key to be free
// and the second to be as it was read; so no two launchers hold it at once. Who holds it counts the
// lease from before it asked for it, and so stops before etcd lets another one in, however long it
// was stopped itself. Only an address and two numbers are kept there, and none of them is trusted:
// launchers prove to each other that they know the job's secret.
//
// Owns a thread, which does the talking. Thread-safe. Where etcd does not answer, that is logged
// when it begins and when it ends; nothing is thrown.
class Election {
 public:
  enum class Wish {
    rest,          // to know nothing
    look,          // to know who holds the office
    stand,         // to take it where it is free
    stand_behind,  // the same, but after those who were of the job when it had somebody
  };
  enum class Office {
    unknown,   // etcd has not answered since the wish
    vacant,    // nobody's
    others,    // another launcher's
    ours,      // this one's
    doubtful,  // it was this one's, and etcd has not said since for how much longer
    lost,      // it was this one's; another has it, or has had it since
  };
  struct Standing {
    Office office = Office::unknown;
    net::Address hub;        // of others
    std::int64_t term = 0;   // of others, ours, doubtful and lost
    std::uint64_t look = 0;  // counts answers
    std::string trouble;     // why etcd does not answer; empty where it does
  };

  // Of a launcher that is of no job yet, and claims this node rank: only node 0's takes the office.
  static Wish wish_of_newcomer(std::optional<int> node_rank) {
    return node_rank.value_or(0) == 0 ? Wish::stand_behind : Wish::look;
  }

  // How long the office outlasts its holder.
  static constexpr milliseconds kLease{4000};

  // `own` is where others can reach this launcher.
  Election(std::vector<net::Address> members, const std::string& job, const net::Address& own);

  // Gives the office up, where it is held: the job has ended.
  ~Election();
  Election(const Election&) = delete;
  Election& operator=(const Election&) = delete;

  // Of a launcher that does not act as the holder of the office: where it has won it meanwhile, it
  // gives it back. What was known before is forgotten.
  void wish(Wish wish);

  Standing standing() const;

  // Has etcd confirm that the office is still held, now: to be asked before a generation is formed,
  // which may be once `confirmed` is its number.
  void confirm(int generation);
  std::optional<int> confirmed() const;

  // Where etcd is, and the key that holds the outcome, for messages.
  std::string where() const { return etcd_.members(); }
  const std::string& key() const { return hub_key_; }

 private:
  void run(const std::stop_token& stop);
  void step();
  void keep();
  void look();
  void see(const std::vector<Etcd::Value>& values);
  bool campaign(const Etcd::Value& term);
  void give_back();
  void hold(std::int64_t created, std::int64_t term, Clock::time_point until);
  void note_trouble(const std::string& what);
  std::string own_text() const;
  void resign();

  const std::string hub_key_, term_key_;
  const net::Address own_;

  // The thread's own.
  Etcd etcd_;
  Etcd::Lease lease_;
  Clock::time_point lease_until_;  // at the earliest
  std::int64_t created_ = 0;       // revision at which our key was made
  std::optional<Clock::time_point> vacant_since_;
  bool seen_somebody_ = false;  // in the office, since the wish

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  Wish wish_ = Wish::rest;
  std::uint64_t num_wishes_ = 0;
  Standing standing_;
  Clock::time_point ours_until_;
  int to_confirm_ = -1;
  std::optional<int> confirmed_;
  bool unwanted_ = false;  // the office, which the thread has won
  int num_failures_ = 0;   // since etcd last answered
  bool urgent_ = false;    // the thread is not to wait

  std::jthread thread_;
};

}  // namespace lockstep::elastic

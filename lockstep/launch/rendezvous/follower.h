// The part of every launcher but the leader in what launchers tell each other.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/launch/rendezvous/election.h>
#include <lockstep/launch/rendezvous/rendezvous.h>

namespace lockstep::launch {

// Talks to the leader only. When the leader is lost, and restarts are left, the survivors of the
// last rank table gather at the first of them, in its order, that can be reached: it becomes the
// leader. All know from it where the others listen. With etcd, they learn from there who
// leads, or are elected, however few they are.
class Follower final : public Peers {
 public:
  // `listener` is where others may find this launcher later; null where they never need to.
  // `leader` is the accepted attempt to join it. `election` is null without etcd.
  Follower(RendezvousOptions options, const net::Secret& secret, std::shared_ptr<Listener> listener,
           std::shared_ptr<Election> election, Attempt leader);

  // A launcher that led the job and leads no more; `how` says why. `last` and `decision` are as it
  // knew them.
  Follower(RendezvousOptions options, const net::Secret& secret, std::shared_ptr<Listener> listener,
           std::shared_ptr<Election> election, const std::optional<RankTable>& last,
           const std::optional<Decision>& decision, const std::string& how);

  void add_to(std::vector<pollfd>& polled) const override;
  void attend() override;
  void announce(const Failure& failure) override;
  void announce_done() override;
  void announce_ready() override;
  bool announce_pause() override;
  void announce_resume() override;
  std::unique_ptr<Peers> successor() override;

 private:
  void handle(const Connection::Message& message);
  void follow(Attempt leader);
  void lose_leader(const std::string& how);
  bool may_go_on() const;
  Introduction introduction() const;
  void seek_leader();
  void seek_elected();
  void seek_running_job();
  void seek_survivors();
  void fail_to_find(const std::string& why);
  void take_over();
  void end(const Failure& failure);

  const RendezvousOptions options_;
  const net::Secret secret_;
  const std::shared_ptr<Listener> listener_;
  const std::shared_ptr<Election> election_;
  Deadline first_table_by_;
  net::Address leader_;
  Connection connection_;  // to the leader
  std::optional<RankTable> table_;
  bool over_ = false;
  bool ready_ = false;               // this host's ranks have ended or left, as was decided
  std::optional<Deadline> seeking_;  // set while there is no leader: when to give up
  std::uint64_t answers_seen_ = 0;   // etcd's answers that were followed
  std::string last_reason_;          // why the launcher that etcd names did not accept this one
  std::unique_ptr<Peers> successor_;
  Clock::time_point next_beat_ = Clock::now();
};

}  // namespace lockstep::launch

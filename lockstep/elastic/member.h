// The half of all launchers but node 0's in what launchers tell each other.
#pragma once

#include <memory>
#include <optional>

#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/door.h>
#include <lockstep/elastic/election.h>
#include <lockstep/elastic/knock.h>
#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// Talks to node 0 only. When that is lost, and restarts are left, the others of the last layout
// find together at the first of them, in its order, that can be reached: it becomes the hub. All
// know where the others' doors are. Where etcd settles who is the hub, they learn that from there,
// or are elected, be they as few as they may.
class Member final : public Peers {
 public:
  // `door` is where others may find this launcher later; null where nobody needs to. `hub` is what
  // came of the visit at node 0's. `election` is null where there is none.
  Member(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
         std::shared_ptr<Election> election, Visit hub);

  // One that was the hub itself, and lost that place: `how` says why. `last` and `decision` are as
  // it knew them.
  Member(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
         std::shared_ptr<Election> election, const std::optional<Layout>& last,
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
  void hear(const Channel::Message& message);
  void belong_to(net::Address hub, Channel channel);
  void lose_hub(const std::string& how);
  bool may_go_on() const;
  Introduction introduction() const;
  void seek_hub();
  void seek_elected();
  void fail_to_find(const std::string& why);
  void take_over();
  void end(const Failure& failure);

  const MeetingOptions options_;
  const net::Secret secret_;
  const std::shared_ptr<Door> door_;
  const std::shared_ptr<Election> election_;
  Deadline first_meeting_deadline_;
  net::Address hub_;  // where node 0 is
  Channel channel_;   // to it
  std::optional<Layout> layout_;
  bool over_ = false;
  bool ready_ = false;                // its ranks have ended, as was decided
  std::optional<Deadline> orphaned_;  // since the hub was lost: to find another one by
  std::uint64_t last_look_ = 0;       // at etcd's word, that was followed
  std::string last_reason_;           // why whom it names did not let this launcher in
  std::unique_ptr<Peers> successor_;
  Clock::time_point next_beat_;
};

}  // namespace lockstep::elastic

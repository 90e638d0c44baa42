// The half of all launchers but node 0's in what launchers tell each other.
#pragma once

#include <memory>
#include <optional>

#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/door.h>
#include <lockstep/elastic/knock.h>
#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// Talks to node 0 only. When that is lost, and restarts are left, the others of the last layout
// find together at the first of them, in its order, that can be reached: it becomes the hub. All
// know where the others' doors are.
class Member final : public Peers {
 public:
  // `door` is where others may find this launcher later; null where nobody needs to. `hub` is what
  // came of the visit at node 0's.
  Member(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door, Visit hub);

  void add_to(std::vector<pollfd>& polled) const override;
  void attend() override;
  void announce(const Failure& failure) override;
  void announce_done() override;
  void announce_ready() override;
  std::unique_ptr<Peers> successor() override;

 private:
  void hear(const Channel::Message& message);
  void belong_to(net::Address hub, Channel channel);
  void lose_hub(const std::string& how);
  bool may_go_on() const;
  void seek_hub();
  void take_over();
  void end(const Failure& failure);

  const MeetingOptions options_;
  const net::Secret secret_;
  const std::shared_ptr<Door> door_;
  Deadline first_meeting_deadline_;
  net::Address hub_;  // where node 0 is
  Channel channel_;   // to it
  std::optional<Layout> layout_;
  bool over_ = false;
  bool ready_ = false;                // its ranks have ended, as was decided
  std::optional<Deadline> orphaned_;  // since the hub was lost: to find another one by
  std::unique_ptr<Peers> successor_;
  Clock::time_point next_beat_;
};

}  // namespace lockstep::elastic

// The half of all launchers but node 0's in what launchers tell each other.
#pragma once

#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// Talks to node 0 only.
class Member final : public Peers {
 public:
  // Comes to node 0, which is at one of the endpoints, and introduces itself. CommError where
  // nobody answers in time, or the secret differs.
  Member(MeetingOptions options, const net::Secret& secret);

  void add_to(std::vector<pollfd>& polled) const override;
  void attend() override;
  void announce(const Failure& failure) override;
  void announce_done() override;
  void announce_ready() override;

 private:
  void hear(const Channel::Message& message);
  void lose_hub(const std::string& how);

  const MeetingOptions options_;
  Deadline first_meeting_deadline_;
  net::Address hub_;  // where node 0 is
  Channel channel_;   // to it
  std::optional<Layout> layout_;
  bool over_ = false;
  Clock::time_point next_beat_;
};

}  // namespace lockstep::elastic

// Node 0's half of what launchers tell each other.
#pragma once

#include <memory>
#include <string>

#include <lockstep/elastic/door.h>
#include <lockstep/elastic/election.h>
#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/elastic/seats.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/server.h>

namespace lockstep::elastic {

// Lets the other launchers in, at first and later; numbers them and gives each generation a store
// of its own, so that what is left of an older one finds nothing; hears of failures and decides.
//
// What it decides: a failure ends the job where no restart is left or would help. A lost node is a
// failure as any other. Nodes that come while there are fewer than the most make the job be formed
// anew, which uses up no restart. After a failure it is formed from those that are left, at once
// where they are enough; otherwise it waits for others as long as for the first meeting. Whoever
// goes on is more than half of the generation before, or half of it with its hub: of
// two halves that do not hear each other, only one goes on. After taking over, all that count have
// to confirm that they are still with this hub before the job is formed: one that has gone on to
// another is not counted by both.
//
// Where it was elected, that rule is not needed: it forms a generation only once etcd has confirmed
// that it is the hub. While etcd does not answer, ranks run on, and nobody is let in. When another
// hub has been elected meanwhile, it stops being one, ends its ranks and becomes a Member.
class Hub final : public Peers {
 public:
  // `election` has been won; null where there is none.
  Hub(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
      std::shared_ptr<Election> election);

  // In the place of the hub of `last`, a layout that this launcher is part of, which is lost: the
  // others of it come here by themselves. `decision` says why its ranks end.
  Hub(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
      std::shared_ptr<Election> election, const Layout& last, const Decision& decision);

  ~Hub() override;

  void add_to(std::vector<pollfd>& polled) const override;
  void attend() override;
  void announce(const Failure& failure) override;
  void announce_done() override;
  void announce_ready() override;
  bool announce_pause() override;
  void announce_resume() override;
  std::unique_ptr<Peers> successor() override;

 private:
  enum class Phase { gathering, running, over };

  bool first_meeting() const { return generation_ < 0 && newest_seen_ < 0; }
  int next_generation() const { return std::max(generation_, newest_seen_) + 1; }
  Seat& own() { return seats_.front(); }
  int num_members() const;

  void check_office();
  void step_down();
  void receive_arrivals();
  void learn_from(const Introduction& who);
  void hear_seats();
  void hear(Seat& seat, const Channel::Message& message);
  void lose(const Seat& seat, const std::string& how);
  void decide(Decision decision);
  void fail(const Failure& failure);
  void tell_members(const std::string& word, const std::string& text);
  void consider_growth();
  void check_done();
  void check_pause();

  void gather();
  bool has_quorum() const;
  bool fellows_may_come() const;
  bool may_form(bool asked);
  bool fellows_confirm(bool asked);
  void form();
  void say_who_is_missing(int size);
  void give_up(const std::string& why);

  const MeetingOptions options_;
  const net::Secret secret_;
  const std::shared_ptr<Door> door_;
  const std::shared_ptr<Election> election_;
  std::unique_ptr<store::Server> server_;
  Deadline server_until_ = Deadline::never();  // where ranks may still need it after the decision
  Seats seats_;
  Phase phase_ = Phase::gathering;
  bool in_office_ = false;              // as far as etcd has said; without an election always
  Clock::time_point doubtful_since_;    // where it is not
  bool asked_to_confirm_ = false;       // etcd or the fellows, that a generation may be formed
  std::optional<Layout> layout_;        // the last
  int generation_ = -1;                 // its number
  int newest_seen_ = -1;                // of those that others have been part of
  int last_size_ = 0;                   // its nodes
  std::optional<Deadline> fellows_by_;  // for those of the last layout to come, after taking over
  int num_restarts_ = 0;
  Deadline gather_deadline_;
  bool told_waiting_ = false;
  Clock::time_point last_arrival_;
  Clock::time_point next_beat_;
  std::unique_ptr<Peers> successor_;
};

}  // namespace lockstep::elastic

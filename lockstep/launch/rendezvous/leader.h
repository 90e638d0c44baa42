// The leader's part in what launchers tell each other.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/launch/rendezvous/election.h>
#include <lockstep/launch/rendezvous/rendezvous.h>
#include <lockstep/store/server.h>

namespace lockstep::launch {

// A launcher that the leader knows: one that is part of the table, or waits to be.
struct Member {
  // Whether it has confirmed that it is still there, and with this leader.
  enum class Confirmation { not_asked, asked, given };

  Connection connection;  // closed in the leader's own entry
  Introduction who;
  int node_rank = -1;   // -1: it is in no table yet
  bool ready = true;    // it has no ranks, and may be in the next table
  bool done = false;    // its ranks have ended well
  bool paused = false;  // its user has paused the job
  Confirmation confirmation = Confirmation::not_asked;
};

// Lets the other launchers in, at first and later; numbers them and gives each generation a store
// of its own, so that a process left from an older one finds nothing; hears of failures and
// decides.
//
// A failure, the loss of a node included, ends the job where no restart is left or none would help.
// Nodes that come while there are fewer than the most have the job formed again, which uses up no
// restart. After a failure the job is formed from the survivors, at once where they are enough;
// otherwise the leader waits for others as long as at the first rendezvous. The nodes that go on
// must be more than half of the last generation, or half of it with its leader: of two halves that
// do not hear each other, only one goes on. After a takeover, each survivor that counts has to
// confirm that it is still with this leader before the job is formed: one that has gone over to
// another leader must not be counted by both.
//
// An elected leader does not need that rule: it forms a generation only once etcd has confirmed
// that it leads. While etcd does not answer, ranks run on, and nobody is let in. When another
// launcher has been elected meanwhile, it stops leading, ends its ranks and becomes a Follower.
class Leader final : public Peers {
 public:
  // `election` has been won; null without etcd.
  Leader(RendezvousOptions options, const net::Secret& secret, std::shared_ptr<Listener> listener,
         std::shared_ptr<Election> election);

  // Takes over from the leader of `last`, a table that this launcher is part of, which is lost:
  // its survivors connect by themselves. `decision` says why its ranks end.
  Leader(RendezvousOptions options, const net::Secret& secret, std::shared_ptr<Listener> listener,
         std::shared_ptr<Election> election, const RankTable& last, const Decision& decision);

  ~Leader() override;

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

  bool first_rendezvous() const { return generation_ < 0 && newest_seen_ < 0; }
  int next_generation() const { return std::max(generation_, newest_seen_) + 1; }
  Member& own() { return members_.front(); }
  int num_in_table() const;

  void check_leadership();
  void step_down();
  void receive_arrivals();
  void learn_from(const Introduction& who);
  std::string objection(const Introduction& who) const;
  void hear_members();
  void handle(Member& member, const Connection::Message& message);
  void lose(const Member& member, const std::string& how);
  void decide(Decision decision);
  void fail(const Failure& failure);
  void tell_members(const std::string& word, const std::string& text = "");
  void consider_growth();
  void check_done();
  void check_pause();

  void gather();
  bool has_quorum() const;
  bool survivors_may_come() const;
  bool may_form(bool asked);
  bool survivors_confirm(bool asked);
  void number_members();
  void form();
  void say_who_is_missing(int size);
  std::string missing_nodes() const;
  void give_up(const std::string& why);

  const RendezvousOptions options_;
  const net::Secret secret_;
  const std::shared_ptr<Listener> listener_;
  const std::shared_ptr<Election> election_;
  std::unique_ptr<store::Server> server_;
  Deadline server_until_ = Deadline::never();  // ranks may still need it after a decision to grow
  std::vector<Member> members_;                // the leader's own entry is the first
  Phase phase_ = Phase::gathering;
  bool leads_ = false;                    // as far as etcd has said; always true without etcd
  Clock::time_point doubtful_since_;      // where it does not lead
  bool asked_to_confirm_ = false;         // etcd or the survivors, that a generation may be formed
  std::optional<RankTable> table_;        // the last one
  int generation_ = -1;                   // its number
  int newest_seen_ = -1;                  // the newest generation that others have been part of
  int last_size_ = 0;                     // how many nodes the last table had
  std::optional<Deadline> survivors_by_;  // after a takeover: when survivors must have come
  int num_restarts_ = 0;
  Deadline gather_deadline_;
  bool told_waiting_ = false;
  Clock::time_point last_arrival_ = Clock::now();
  Clock::time_point next_beat_ = Clock::now();
  std::unique_ptr<Peers> successor_;
};

}  // namespace lockstep::launch

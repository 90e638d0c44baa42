#include <lockstep/launch/rendezvous/follower.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/launch/rendezvous/leader.h>

namespace lockstep::launch {

namespace {

// The leader knows best which launchers are missing: wait a little longer for its message.
constexpr milliseconds kLastMessage(2000);

// How long to look for another leader, or to become it; longer than a leader waits for its quorum.
constexpr milliseconds kSeeking(9000);
constexpr milliseconds kAttemptWhileSeeking(1000);

}  // namespace

Follower::Follower(RendezvousOptions options, const net::Secret& secret,
                   std::shared_ptr<Listener> listener, std::shared_ptr<Election> election,
                   Attempt leader)
    : options_(std::move(options)),
      secret_(secret),
      listener_(std::move(listener)),
      election_(std::move(election)),
      first_table_by_(Deadline::after(options_.timeout + kLastMessage)) {
  follow(std::move(leader));
}

Follower::Follower(RendezvousOptions options, const net::Secret& secret,
                   std::shared_ptr<Listener> listener, std::shared_ptr<Election> election,
                   const std::optional<RankTable>& last, const std::optional<Decision>& decision,
                   const std::string& how)
    : options_(std::move(options)),
      secret_(secret),
      listener_(std::move(listener)),
      election_(std::move(election)),
      first_table_by_(Deadline::after(options_.timeout + kLastMessage)),
      leader_(listener_->address()),
      table_(last) {
  decision_ = decision;
  if (decision) failure_ = decision->failure;
  lose_leader(how);
}

void Follower::follow(Attempt leader) {
  leader_ = std::move(leader.leader);
  connection_ = std::move(leader.connection);
  if (seeking_ && !table_) first_table_by_ = Deadline::after(options_.timeout + kLastMessage);
  seeking_.reset();
  if (election_) election_->wish(Election::Wish::idle);
  if (!listener_) return;
  listener_->turn_away("redirected", leader_.text());
  for (Arrival& arrival : listener_->arrivals())
    arrival.connection.send("redirected", leader_.text());
}

void Follower::add_to(std::vector<pollfd>& polled) const {
  if (connection_.open()) polled.push_back({connection_.fd(), POLLIN, 0});
}

void Follower::attend() {
  if (over_ || successor_) return;
  if (seeking_) {
    seek_leader();
    return;
  }
  const auto now = Clock::now();
  if (now >= next_beat_) {
    connection_.send("alive");
    next_beat_ = now + kBeat;
  }
  while (const auto message = connection_.receive()) handle(*message);
  if (over_) return;
  if (!connection_.open()) {
    lose_leader("its connection closed; it died or was killed");
  } else if (!paused_ && now - connection_.last_heard() > kLongestSilence) {
    lose_leader(fmt::format("no word from it for {:.0f} s; is it stopped, or its network down?",
                            std::chrono::duration<double>(kLongestSilence).count()));
  } else if (!table_ && first_table_by_.passed()) {
    fail_rendezvous(
        Fault::timeout,
        fmt::format("Node 0 at {} is there, but not all of the {} nodes came within {:.1f} "
                    "s.",
                    leader_.text(), node_range(options_.min_nodes, options_.max_nodes),
                    std::chrono::duration<double>(options_.timeout).count()));
  }
}

void Follower::handle(const Connection::Message& message) {
  if (message.word == "layout") {
    table_ = RankTable::decode(message.text);
    ready_ = false;
    begin(*table_);
  } else if (message.word == "decision") {
    decision_ = Decision::decode(message.text);
    if (decision_->failure) failure_ = decision_->failure;
    over_ = decision_->action == Decision::Action::end;
  } else if (message.word == "pause" || message.word == "resume") {
    paused_ = message.word == "pause";
  } else if (message.word == "confirm") {
    connection_.send("confirmed");
  } else if (message.word == "end") {
    all_done_ = over_ = true;
  } else if (message.word == "waiting") {
    log::warn("{}", message.text);
    if (!table_) first_table_by_ = Deadline::never();  // its beats show that it is there
  } else if (message.word == "refused") {
    fail_rendezvous(Fault::refused,
                    fmt::format("Node 0 at {} says: {}.", leader_.text(), message.text));
  }
}

bool Follower::may_go_on() const {
  if (failure_ && !worth_a_restart(*failure_)) return false;
  return listener_ && (election_ || table_->num_nodes() >= 3) &&
         table_->num_restarts < table_->max_restarts;
}

void Follower::lose_leader(const std::string& how) {
  connection_.close();
  paused_ = false;
  // A launcher that only waits to be let in may find the job elsewhere.
  if (!table_ && (election_ || (options_.elastic() && options_.endpoints.size() > 1))) {
    log::warn("node 0 at {} is gone ({}); looking for the job {}", leader_.text(), how,
              election_ ? "through etcd" : "at the other endpoints");
    seeking_ = Deadline::after(options_.timeout);
    if (election_) election_->wish(Election::wish_of_newcomer(options_.node_rank));
    return;
  }
  if (!table_)
    fail_rendezvous(
        Fault::peer_lost,
        fmt::format("The launcher of node 0 at {} went away before all of the {} nodes had "
                    "come.",
                    leader_.text(), node_range(options_.min_nodes, options_.max_nodes)));
  Failure failure{.kind = Failure::Kind::node_lost,
                  .node_rank = 0,
                  .host = table_->nodes.front().host,
                  .generation = table_->generation,
                  .detail = how};
  if (!may_go_on()) {
    if (table_->num_nodes() == 2 && table_->max_restarts > 0)
      failure.detail += "; of two nodes, only node 0 can go on alone";
    end(failure_ && !decision_ ? *failure_ : failure);
    return;
  }
  if (!decision_) {
    failure_ = failure;
    decision_ = Decision{Decision::Action::restart, failure, ""};
  } else {
    log::warn("{}", failure.sentence());
  }
  seeking_ = Deadline::after(election_ ? options_.timeout : kSeeking);
  if (election_) {
    listener_->turn_away("nobody");
    election_->wish(Election::Wish::campaign);
  } else {
    listener_->let_in();
  }
}

Introduction Follower::introduction() const {
  Introduction who = options_.introduction(listener_ ? listener_->address().text() : "");
  if (table_) {
    who.last_generation = table_->generation;
    who.last_node_rank = table_->node_rank;
    who.last_restarts = table_->num_restarts;
    who.ready = ready_;
  }
  return who;
}

// Follows etcd's latest answer. It is not trusted: the launcher that it names must know the job's
// secret, and one that does not is only a reason to look again.
void Follower::seek_elected() {
  const Election::Status status = election_->status();
  if (status.leadership == Election::Leadership::ours) {
    take_over();
    return;
  }
  if (status.leadership == Election::Leadership::others && status.answers != answers_seen_) {
    answers_seen_ = status.answers;
    try {
      Attempt found = try_to_join(status.leader, introduction(), secret_,
                                  Deadline::after(kAttemptWhileSeeking));
      if (found.outcome == Attempt::Outcome::accepted) {
        follow(std::move(found));
        return;
      }
      last_reason_ = fmt::format("{}: {}", status.leader.text(),
                                 found.reason.empty() ? "no answer" : found.reason);
    } catch (const CommError& error) {
      last_reason_ = error.details().explanation;
    }
  }
  if (!seeking_->passed()) return;
  const std::string& why = status.trouble.empty() ? last_reason_ : status.trouble;
  fail_to_find(fmt::format("no other was found through etcd at {} within {:.1f} s{}",
                           election_->where(), seeking_->span_seconds(),
                           why.empty() ? "" : " (" + why + ")"));
}

void Follower::fail_to_find(const std::string& why) {
  if (!table_)
    fail_rendezvous(Fault::peer_lost, fmt::format("The launcher of node 0 at {} went away, and {}.",
                                                  leader_.text(), why));
  end({.kind = Failure::Kind::too_few,
       .host = table_->here().host,
       .generation = table_->generation,
       .detail = fmt::format("the job could not be formed anew: node 0 is lost, and {}", why)});
}

// One round of looking for another leader. This host's ranks may still be ending meanwhile, so a
// round takes only a moment where it finds a launcher.
void Follower::seek_leader() {
  if (election_) {
    seek_elected();
  } else if (!table_) {
    seek_running_job();
  } else {
    seek_survivors();
  }
}

// Without a rank table of its own, this launcher may find the job at another endpoint.
void Follower::seek_running_job() {
  for (const net::Address& endpoint : options_.endpoints) {
    Attempt found = try_to_follow(endpoint, introduction(), secret_, kAttemptWhileSeeking);
    if (found.outcome != Attempt::Outcome::accepted) continue;
    follow(std::move(found));
    return;
  }
  if (seeking_->passed())
    fail_to_find(fmt::format("the job was found at none of the other endpoints within {:.1f} s",
                             seeking_->span_seconds()));
}

// The first survivor of the rank table becomes the leader. One that can be reached but does not
// know yet that the leader is lost is asked again in the next round.
void Follower::seek_survivors() {
  if (seeking_->passed()) {
    fail_to_find(fmt::format("this host found none of the others within {:.0f} s",
                             seeking_->span_seconds()));
    return;
  }
  for (int node = 1; node < table_->node_rank; ++node) {
    const std::string& address = table_->nodes[static_cast<std::size_t>(node)].address;
    Attempt found = try_to_join(net::Address::parse(address, 0, "the rank table"), introduction(),
                                secret_, Deadline::after(kAttemptWhileSeeking));
    const bool nobody = found.outcome == Attempt::Outcome::unreachable ||
                        found.outcome == Attempt::Outcome::stranger;  // or a stopped launcher
    if (nobody) continue;
    if (found.outcome == Attempt::Outcome::accepted) follow(std::move(found));
    return;
  }
  take_over();
}

void Follower::take_over() {
  log::warn("this host takes the place of node 0");
  if (!table_) {
    successor_ = std::make_unique<Leader>(options_, secret_, listener_, election_);
    return;
  }
  successor_ =
      std::make_unique<Leader>(options_, secret_, listener_, election_, *table_, *decision_);
  if (ready_) successor_->announce_ready();
}

std::unique_ptr<Peers> Follower::successor() { return std::move(successor_); }

void Follower::end(const Failure& failure) {
  over_ = true;
  failure_ = failure;
  decision_ = Decision{Decision::Action::end, failure, ""};
}

void Follower::announce(const Failure& failure) {
  const bool interrupted = failure.kind == Failure::Kind::interrupted;
  const bool overrules = interrupted || (failure.final && failure_ && worth_a_restart(*failure_));
  if (over_ || (failure_ && !overrules)) return;
  failure_ = failure;
  // This overrides what the leader has decided.
  if (interrupted || failure.final) decision_.reset();
  connection_.send("failure", failure.encode());
  if (seeking_) end(failure);
}

void Follower::announce_done() { connection_.send("done"); }

bool Follower::announce_pause() {
  if (election_ || seeking_) return false;
  paused_ = true;
  connection_.send("pause");
  return true;
}

// The leader says when all go on.
void Follower::announce_resume() { connection_.send("resume"); }

void Follower::announce_ready() {
  ready_ = true;
  connection_.send("ready");
}

}  // namespace lockstep::launch

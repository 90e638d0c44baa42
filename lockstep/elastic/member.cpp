#include <lockstep/elastic/member.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/hub.h>

namespace lockstep::elastic {

namespace {

// Node 0 knows best who is missing: its word is worth waiting a little longer for.
constexpr milliseconds kLastWord(2000);

// To find another hub, or to become it; longer than a hub waits for more than half to come.
constexpr milliseconds kSeeking(9000);
constexpr milliseconds kVisitWhileSeeking(1000);

[[noreturn]] void cannot_meet(Fault fault, const std::string& explanation) {
  throw CommError(
      {.fault = fault, .operation = "meeting of the launchers", .explanation = explanation});
}

}  // namespace

Member::Member(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
               std::shared_ptr<Election> election, Visit hub)
    : options_(std::move(options)),
      secret_(secret),
      door_(std::move(door)),
      election_(std::move(election)),
      first_meeting_deadline_(Deadline::after(options_.timeout + kLastWord)),
      next_beat_(Clock::now()) {
  belong_to(std::move(hub.hub), std::move(hub.channel));
}

Member::Member(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
               std::shared_ptr<Election> election, const std::optional<Layout>& last,
               const std::optional<Decision>& decision, const std::string& how)
    : options_(std::move(options)),
      secret_(secret),
      door_(std::move(door)),
      election_(std::move(election)),
      first_meeting_deadline_(Deadline::after(options_.timeout + kLastWord)),
      hub_(door_->address()),
      layout_(last),
      next_beat_(Clock::now()) {
  decision_ = decision;
  if (decision) failure_ = decision->failure;
  lose_hub(how);
}

void Member::belong_to(net::Address hub, Channel channel) {
  hub_ = std::move(hub);
  channel_ = std::move(channel);
  orphaned_.reset();
  if (election_) election_->wish(Election::Wish::rest);
  if (!door_) return;
  door_->send_away("elsewhere", hub_.text());
  for (Arrival& arrival : door_->arrivals()) arrival.channel.send("elsewhere", hub_.text());
}

void Member::add_to(std::vector<pollfd>& polled) const {
  if (channel_.open()) polled.push_back({channel_.fd(), POLLIN, 0});
}

void Member::attend() {
  if (over_ || successor_) return;
  if (orphaned_) {
    seek_hub();
    return;
  }
  const auto now = Clock::now();
  if (now >= next_beat_) {
    channel_.send("alive");
    next_beat_ = now + kBeat;
  }
  while (const auto message = channel_.receive()) hear(*message);
  if (over_) return;
  if (!channel_.open()) {
    lose_hub("its connection closed; it died or was killed");
  } else if (!paused_ && now - channel_.last_heard() > kLongestSilence) {
    lose_hub(fmt::format("no word from it for {:.0f} s; is it stopped, or its network down?",
                         std::chrono::duration<double>(kLongestSilence).count()));
  } else if (!layout_ && first_meeting_deadline_.passed()) {
    cannot_meet(Fault::timeout,
                fmt::format("Node 0 at {} is there, but not all of the {} nodes came within {:.1f} "
                            "s.",
                            hub_.text(), node_range(options_.min_nodes, options_.max_nodes),
                            std::chrono::duration<double>(options_.timeout).count()));
  }
}

void Member::hear(const Channel::Message& message) {
  if (message.word == "layout") {
    layout_ = Layout::decode(message.text);
    ready_ = false;
    begin(*layout_);
  } else if (message.word == "decision") {
    decision_ = Decision::decode(message.text);
    if (decision_->failure) failure_ = decision_->failure;
    over_ = decision_->action == Decision::Action::end;
  } else if (message.word == "pause" || message.word == "resume") {
    paused_ = message.word == "pause";
  } else if (message.word == "confirm") {
    channel_.send("confirmed");
  } else if (message.word == "end") {
    all_done_ = over_ = true;
  } else if (message.word == "waiting") {
    log::warn("{}", message.text);
    if (!layout_) first_meeting_deadline_ = Deadline::never();  // its beats tell that it is there
  } else if (message.word == "refused") {
    cannot_meet(Fault::refused, fmt::format("Node 0 at {} says: {}.", hub_.text(), message.text));
  }
}

bool Member::may_go_on() const {
  if (failure_ && !worth_a_restart(*failure_)) return false;
  return door_ && (election_ || layout_->num_nodes() >= 3) &&
         layout_->num_restarts < layout_->max_restarts;
}

void Member::lose_hub(const std::string& how) {
  channel_.close();
  paused_ = false;
  // One that only waits may find the job elsewhere.
  if (!layout_ && (election_ || (options_.elastic() && options_.endpoints.size() > 1))) {
    log::warn("node 0 at {} is gone ({}); looking for the job {}", hub_.text(), how,
              election_ ? "through etcd" : "at the other endpoints");
    orphaned_ = Deadline::after(options_.timeout);
    if (election_) election_->wish(Election::wish_of_newcomer(options_.node_rank));
    return;
  }
  if (!layout_)
    cannot_meet(Fault::peer_lost,
                fmt::format("The launcher of node 0 at {} went away before all of the {} nodes had "
                            "come.",
                            hub_.text(), node_range(options_.min_nodes, options_.max_nodes)));
  Failure failure{.kind = Failure::Kind::node_lost,
                  .node_rank = 0,
                  .host = layout_->nodes.front().host,
                  .generation = layout_->generation,
                  .detail = how};
  if (!may_go_on()) {
    if (layout_->num_nodes() == 2 && layout_->max_restarts > 0)
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
  orphaned_ = Deadline::after(election_ ? options_.timeout : kSeeking);
  if (election_) {
    door_->send_away("nobody", "");
    election_->wish(Election::Wish::stand);
  } else {
    door_->send_away("", "");
  }
}

Introduction Member::introduction() const {
  Introduction who = introduce(options_, door_ ? door_->address().text() : "");
  if (layout_) {
    who.last_generation = layout_->generation;
    who.last_node_rank = layout_->node_rank;
    who.last_restarts = layout_->num_restarts;
    who.ready = ready_;
  }
  return who;
}

// One look at what etcd says. It is not trusted: a launcher that it names must know the job's
// secret, and one that does not is only a reason to look again.
void Member::seek_elected() {
  const Election::Standing standing = election_->standing();
  if (standing.office == Election::Office::ours) {
    take_over();
    return;
  }
  if (standing.office == Election::Office::others && standing.look != last_look_) {
    last_look_ = standing.look;
    try {
      Visit found =
          visit(standing.hub, introduction(), secret_, Deadline::after(kVisitWhileSeeking));
      if (found.outcome == Visit::Outcome::welcome) {
        if (!layout_) first_meeting_deadline_ = Deadline::after(options_.timeout + kLastWord);
        belong_to(std::move(found.hub), std::move(found.channel));
        return;
      }
      last_reason_ = fmt::format("{}: {}", standing.hub.text(),
                                 found.reason.empty() ? "no answer" : found.reason);
    } catch (const CommError& error) {
      last_reason_ = error.details().explanation;
    }
  }
  if (!orphaned_->passed()) return;
  const std::string& why = standing.trouble.empty() ? last_reason_ : standing.trouble;
  fail_to_find(fmt::format("no other was found through etcd at {} within {:.1f} s{}",
                           election_->where(), orphaned_->span_seconds(),
                           why.empty() ? "" : " (" + why + ")"));
}

void Member::fail_to_find(const std::string& why) {
  if (!layout_)
    cannot_meet(Fault::peer_lost,
                fmt::format("The launcher of node 0 at {} went away, and {}.", hub_.text(), why));
  end({.kind = Failure::Kind::too_few,
       .host = layout_->here().host,
       .generation = layout_->generation,
       .detail = fmt::format("the job could not be formed anew: node 0 is lost, and {}", why)});
}

// One round. Whoever can be reached but does not yet know that the hub is lost is asked again.
// Ranks may still be ending meanwhile: a visit takes no longer than a moment where somebody is
// there.
void Member::seek_hub() {
  if (election_) {
    seek_elected();
    return;
  }
  const Introduction who = introduction();
  if (!layout_) {
    for (const net::Address& endpoint : options_.endpoints) {
      Visit found = visit(endpoint, who, secret_, Deadline::after(kVisitWhileSeeking));
      if (found.outcome == Visit::Outcome::elsewhere)
        found = visit(found.hub, who, secret_, Deadline::after(kVisitWhileSeeking));
      if (found.outcome != Visit::Outcome::welcome) continue;
      first_meeting_deadline_ = Deadline::after(options_.timeout + kLastWord);
      belong_to(std::move(found.hub), std::move(found.channel));
      return;
    }
    if (orphaned_->passed())
      fail_to_find(fmt::format("the job was found at none of the other endpoints within {:.1f} s",
                               orphaned_->span_seconds()));
    return;
  }
  if (orphaned_->passed()) {
    fail_to_find(fmt::format("this host found none of the others within {:.0f} s",
                             orphaned_->span_seconds()));
    return;
  }
  for (int node = 1; node < layout_->node_rank; ++node) {
    const std::string& address = layout_->nodes[static_cast<std::size_t>(node)].address;
    Visit found = visit(net::Address::parse(address, 0, "the layout"), who, secret_,
                        Deadline::after(kVisitWhileSeeking));
    const bool nobody = found.outcome == Visit::Outcome::unreachable ||
                        found.outcome == Visit::Outcome::stranger;  // one that is stopped, too
    if (nobody) continue;
    if (found.outcome == Visit::Outcome::welcome)
      belong_to(std::move(found.hub), std::move(found.channel));
    return;
  }
  take_over();
}

void Member::take_over() {
  log::warn("this host takes the place of node 0");
  if (!layout_) {
    successor_ = std::make_unique<Hub>(options_, secret_, door_, election_);
    return;
  }
  successor_ = std::make_unique<Hub>(options_, secret_, door_, election_, *layout_, *decision_);
  if (ready_) successor_->announce_ready();
}

std::unique_ptr<Peers> Member::successor() { return std::move(successor_); }

void Member::end(const Failure& failure) {
  over_ = true;
  failure_ = failure;
  decision_ = Decision{Decision::Action::end, failure, ""};
}

void Member::announce(const Failure& failure) {
  const bool interrupted = failure.kind == Failure::Kind::interrupted;
  const bool overrules = interrupted || (failure.final && failure_ && worth_a_restart(*failure_));
  if (over_ || (failure_ && !overrules)) return;
  failure_ = failure;
  // What node 0 has decided is not what it comes to.
  if (interrupted || failure.final) decision_.reset();
  channel_.send("failure", failure.encode());
  if (orphaned_) end(failure);
}

void Member::announce_done() { channel_.send("done"); }

bool Member::announce_pause() {
  if (election_ || orphaned_) return false;
  paused_ = true;
  channel_.send("pause");
  return true;
}

// Node 0 says when all go on.
void Member::announce_resume() { channel_.send("resume"); }

void Member::announce_ready() {
  ready_ = true;
  channel_.send("ready");
}

}  // namespace lockstep::elastic

#include <lockstep/elastic/member.h>

#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/knock.h>

namespace lockstep::elastic {

namespace {

// Node 0 knows best who is missing: its word is worth waiting a little longer for.
constexpr milliseconds kLastWord(2000);

[[noreturn]] void cannot_meet(Fault fault, const std::string& explanation) {
  throw CommError(
      {.fault = fault, .operation = "meeting of the launchers", .explanation = explanation});
}

}  // namespace

Member::Member(MeetingOptions options, const net::Secret& secret)
    : options_(std::move(options)),
      first_meeting_deadline_(Deadline::after(options_.timeout + kLastWord)),
      next_beat_(Clock::now()) {
  Knocked knocked =
      knock(options_.endpoints, introduce(options_, ""), secret, Deadline::after(options_.timeout));
  hub_ = std::move(knocked.hub);
  channel_ = std::move(knocked.channel);
}

void Member::add_to(std::vector<pollfd>& polled) const {
  if (channel_.open()) polled.push_back({channel_.fd(), POLLIN, 0});
}

void Member::attend() {
  if (over_) return;
  const auto now = Clock::now();
  if (now >= next_beat_) {
    channel_.send("alive");
    next_beat_ = now + kBeat;
  }
  while (const auto message = channel_.receive()) hear(*message);
  if (over_) return;
  if (!channel_.open()) {
    lose_hub("its connection closed; it died or was killed");
  } else if (now - channel_.last_heard() > kLongestSilence) {
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
    begin(*layout_);
  } else if (message.word == "decision") {
    decision_ = Decision::decode(message.text);
    if (decision_->failure) failure_ = decision_->failure;
    over_ = decision_->action == Decision::Action::end;
  } else if (message.word == "end") {
    all_done_ = over_ = true;
  } else if (message.word == "waiting") {
    log::warn("{}", message.text);
    if (!layout_) first_meeting_deadline_ = Deadline::never();  // its beats tell that it is there
  } else if (message.word == "refused") {
    cannot_meet(Fault::refused, fmt::format("Node 0 at {} says: {}.", hub_.text(), message.text));
  }
}

void Member::lose_hub(const std::string& how) {
  channel_.close();
  if (!layout_)
    cannot_meet(Fault::peer_lost,
                fmt::format("The launcher of node 0 at {} went away before all of the {} nodes had "
                            "come.",
                            hub_.text(), node_range(options_.min_nodes, options_.max_nodes)));
  over_ = true;
  if (!failure_ || decision_)
    failure_ = Failure{.kind = Failure::Kind::node_lost,
                       .node_rank = 0,
                       .host = layout_->nodes.front().host,
                       .generation = layout_->generation,
                       .detail = how};
  decision_ = Decision{Decision::Action::end, failure_, ""};
}

void Member::announce(const Failure& failure) {
  const bool interrupted = failure.kind == Failure::Kind::interrupted;
  if (over_ || (failure_ && !interrupted)) return;
  failure_ = failure;
  channel_.send("failure", failure.encode());
}

void Member::announce_done() { channel_.send("done"); }

void Member::announce_ready() { channel_.send("ready"); }

}  // namespace lockstep::elastic

#include <lockstep/elastic/peers.h>

#include <algorithm>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

Peers::Peers(const Layout& layout, std::vector<Channel> channels)
    : layout_(layout),
      node_rank_(layout.node_rank),
      channels_(std::move(channels)),
      done_(layout.nodes.size(), false),
      next_beat_(Clock::now()) {}

void Peers::add_to(std::vector<pollfd>& polled) const {
  for (const Channel& channel : channels_)
    if (channel.open()) polled.push_back({channel.fd(), POLLIN, 0});
}

void Peers::attend() {
  const auto now = Clock::now();
  if (now >= next_beat_) {
    tell_all("alive", "");
    next_beat_ = now + kBeat;
  }
  for (std::size_t index = 0; index < channels_.size(); ++index) {
    Channel& channel = channels_[index];
    const bool was_open = channel.open();
    while (const auto message = channel.receive()) hear(index, *message);
    if (channel.open() && now - channel.last_heard() > kLongestSilence) {
      lose(index, fmt::format("no word from it for {:.0f} s; is it stopped, or its network down?",
                              std::chrono::duration<double>(kLongestSilence).count()));
    } else if (was_open && !channel.open()) {
      lose(index, "its connection closed; it died or was killed");
    }
  }
}

void Peers::hear(std::size_t index, const Channel::Message& message) {
  if (message.word == "failure") {
    const Failure failure = Failure::decode(message.text);
    if (hub()) {
      decide(failure);
    } else {
      failure_ = failure;
      confirmed_ = true;
    }
  } else if (message.word == "done" && hub()) {
    done_[index] = true;
    check_done();
  } else if (message.word == "end" && !hub()) {
    all_done_ = true;
  }
}

void Peers::lose(std::size_t index, const std::string& how) {
  channels_[index].close();
  const int node = node_of(index);
  if (all_done_ || failure_ || (hub() && done_[index])) return;
  const Failure failure{.kind = Failure::Kind::node_lost,
                        .node_rank = node,
                        .host = layout_.nodes[static_cast<std::size_t>(node)].host,
                        .detail = how};
  if (hub()) {
    decide(failure);
  } else {
    failure_ = failure;
  }
}

// The hub's decision which failure was the first.
void Peers::decide(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  tell_all("failure", failure.encode());
}

void Peers::announce(const Failure& failure) {
  if (failure_) return;
  if (hub()) {
    decide(failure);
  } else {
    failure_ = failure;
    tell_all("failure", failure.encode());
  }
}

void Peers::announce_done() {
  done_[static_cast<std::size_t>(node_rank_)] = true;
  if (hub()) {
    check_done();
  } else {
    tell_all("done", "");
  }
}

bool Peers::settled() const { return hub() || confirmed_ || !channels_.front().open(); }

void Peers::tell_all(const std::string& word, const std::string& text) {
  for (std::size_t index = 0; index < channels_.size(); ++index) {
    if (!channels_[index].open()) continue;
    channels_[index].send(word, text);
    if (!channels_[index].open()) lose(index, "its connection broke; it died or was killed");
  }
}

void Peers::check_done() {
  if (std::find(done_.begin(), done_.end(), false) != done_.end()) return;
  all_done_ = true;
  tell_all("end", "");
}

}  // namespace lockstep::elastic

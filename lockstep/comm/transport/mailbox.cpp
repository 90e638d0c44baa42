#include <lockstep/comm/transport/mailbox.h>

#include <poll.h>

#include <algorithm>

#include <lockstep/net/socket.h>

namespace lockstep::comm {

Mailbox::Mailbox() : event_(net::make_event()) {}

net::Fd Mailbox::take(int from, Deadline deadline) {
  std::unique_lock lock(mutex_);
  arrived_.wait_until(lock, deadline.at(), [&] { return waiting_.contains(from); });
  const auto found = waiting_.find(from);
  if (found == waiting_.end()) return {};
  net::Fd connection = std::move(found->second);
  waiting_.erase(found);
  lower_event_if_empty();
  return connection;
}

void Mailbox::keep_only(const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  kept_.emplace(ranks.begin(), ranks.end());
  std::erase_if(waiting_, [this](const auto& entry) { return !kept_->contains(entry.first); });
  lower_event_if_empty();
}

void Mailbox::put(int from, net::Fd connection) {
  const std::lock_guard lock(mutex_);
  if (kept_ && !kept_->contains(from)) return;
  waiting_[from] = std::move(connection);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof(one));
  arrived_.notify_all();
}

std::size_t Mailbox::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size();
}

bool Mailbox::all_hung_up() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(waiting_.begin(), waiting_.end(), [](const auto& entry) {
    pollfd polled{entry.second.get(), POLLRDHUP, 0};
    return ::poll(&polled, 1, 0) > 0;
  });
}

void Mailbox::lower_event_if_empty() {
  if (!waiting_.empty()) return;
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof(count));
}

}  // namespace lockstep::comm

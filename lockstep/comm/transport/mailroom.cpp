#include <lockstep/comm/transport/mailroom.h>

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

namespace {

template <typename List>
auto find_group(List& list, const std::string& group_id) {
  return std::find_if(list.begin(), list.end(),
                      [&](const auto& one) { return one.group_id == group_id; });
}

}  // namespace

std::shared_ptr<Mailbox> Mailroom::open(const std::string& group_id) {
  const std::lock_guard lock(mutex_);
  note_left();
  LOCKSTEP_CHECK(!is_over(group_id), "group id '{}' is used again", group_id);
  auto box = mailbox(group_id);
  if (!box) box = std::make_shared<Mailbox>();
  opened_[group_id] = box;
  if (const auto early = find_group(early_, group_id); early != early_.end()) early_.erase(early);
  return box;
}

void Mailroom::close(const std::string& group_id, const Notice& notice) {
  const std::lock_guard lock(mutex_);
  // The first reason counts.
  if (find_group(failed_, group_id) != failed_.end()) return;
  failed_.push_back({group_id, notice});
  if (failed_.size() > limits_.most_failed) failed_.pop_front();
}

GroupState Mailroom::state(const std::string& group_id) const {
  const std::lock_guard lock(mutex_);
  GroupState state;
  const auto box = mailbox(group_id);
  if (box) state.sequence = box->sequence();
  const auto failed = find_group(failed_, group_id);
  if (failed != failed_.end()) state.notice = failed->notice;
  state.open = box != nullptr && !state.notice;
  return state;
}

void Mailroom::deliver(const std::string& group_id, int from, net::Fd connection,
                       Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (is_over(group_id)) return;
  auto box = mailbox(group_id);
  if (!opened_.contains(group_id)) {
    // A peer may be faster than we are: its connection is kept until the group is opened here.
    if (!box) {
      box = std::make_shared<Mailbox>();
      early_.push_back({group_id, box, now});
    }
    find_group(early_, group_id)->since = now;
  }
  if (!box) return;  // the group was left this very moment
  box->put(from, std::move(connection));
  bound_early();
}

bool Mailroom::sweep(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  std::erase_if(early_, [&](const Early& early) {
    return now - early.since >= limits_.hung_up_time && early.mailbox->all_hung_up();
  });
  return !early_.empty();
}

bool Mailroom::is_over(const std::string& group_id) const {
  const auto found = opened_.find(group_id);
  return (found != opened_.end() && found->second.expired()) ||
         find_group(failed_, group_id) != failed_.end() ||
         std::find(left_.begin(), left_.end(), group_id) != left_.end();
}

// The mailbox of a group that is open or yet to be opened.
std::shared_ptr<Mailbox> Mailroom::mailbox(const std::string& group_id) const {
  if (const auto found = opened_.find(group_id); found != opened_.end())
    return found->second.lock();
  const auto early = find_group(early_, group_id);
  return early == early_.end() ? nullptr : early->mailbox;
}

// A group ends when its pointer goes, which may be at any time, so expired entries are found by
// looking at all of them.
void Mailroom::note_left() {
  std::erase_if(opened_, [this](const auto& entry) {
    const bool left = entry.second.expired();
    if (left) left_.push_back(entry.first);
    return left;
  });
  while (left_.size() > limits_.most_left) left_.pop_front();
}

void Mailroom::bound_early() {
  std::size_t connections = 0;
  for (const Early& early : early_) connections += early.mailbox->num_waiting();
  while (early_.size() > limits_.most_early_groups ||
         (connections > limits_.most_early_connections && !early_.empty())) {
    connections -= early_.front().mailbox->num_waiting();
    early_.pop_front();
  }
}

}  // namespace lockstep::comm

#include <lockstep/store/table.h>

#include <algorithm>
#include <charconv>

#include <lockstep/base/error.h>

namespace lockstep::store {

Repeats::Verdict Repeats::look_up(const std::string& client, std::uint64_t call,
                                  std::uint64_t answered) {
  Calls& calls = touch(client);
  calls.answered = std::max(calls.answered, answered);
  calls.results.erase(calls.results.begin(), calls.results.lower_bound(calls.answered));
  if (call < calls.answered) return {Kind::stale, 0};
  const auto found = calls.results.find(call);
  if (found == calls.results.end()) return {Kind::fresh, 0};
  return {Kind::repeated, found->second};
}

void Repeats::remember(const std::string& client, std::uint64_t call, std::int64_t result) {
  auto& results = touch(client).results;
  results[call] = result;
  if (results.size() > kMostCalls) results.erase(results.begin());
}

Repeats::Calls& Repeats::touch(const std::string& client) {
  if (const auto found = index_.find(client); found != index_.end()) {
    clients_.splice(clients_.begin(), clients_, found->second);
    return found->second->second;
  }
  if (clients_.size() >= kMostClients) {
    index_.erase(clients_.back().first);
    clients_.pop_back();
  }
  clients_.emplace_front(client, Calls{});
  index_.emplace(client, clients_.begin());
  return clients_.front().second;
}

namespace {

// Memory that an entry takes besides its bytes: the strings, the node, the bucket.
constexpr std::size_t kEntryBytes = 128;

// Longer waits count as endless; this keeps the clock's arithmetic from overflowing.
constexpr std::uint64_t kLongestPatienceMs = 100ull * 365 * 24 * 3600 * 1000;

bool waits(Op op) { return op == Op::wait || op == Op::watch; }

}  // namespace

void Table::apply(Ticket ticket, const std::string& client, Request request, Clock::time_point now,
                  std::vector<Answer>& answers) {
  if (request.op == Op::get) {
    const auto found = entries_.find(request.keys.front());
    if (found == entries_.end()) {
      answers.push_back({ticket, {.status = Status::absent}});
    } else {
      answers.push_back({ticket, {.values = {found->second.value}}});
    }
    return;
  }
  if (waits(request.op)) {
    Waiter waiter;
    waiter.until = now + milliseconds(std::min(request.patience_ms, kLongestPatienceMs));
    waiter.request = std::move(request);
    if (auto reply = look(waiter)) {
      answers.push_back({ticket, std::move(*reply)});
    } else {
      park(ticket, std::move(waiter));
    }
    return;
  }
  const auto before = repeats_.look_up(client, request.number, request.answered);
  if (before.kind == Repeats::Kind::stale) return;
  if (before.kind == Repeats::Kind::repeated) {
    answers.push_back({ticket, {.number = before.result}});
    return;
  }
  Reply reply = change(request);
  const bool changed = reply.status == Status::ok;
  // Only changes have to be remembered: a refused request may get another answer when it is
  // repeated.
  if (changed) repeats_.remember(client, request.number, reply.number);
  answers.push_back({ticket, std::move(reply)});
  if (changed && request.op != Op::remove) wake(request.keys.front(), answers);
}

Reply Table::change(const Request& request) {
  switch (request.op) {
    case Op::set: return set(request.keys.front(), request.value);
    case Op::compare_and_set: return compare_and_set(request);
    case Op::add: return add(request);
    case Op::remove: return remove(request.keys.front());
    case Op::get:
    case Op::wait:
    case Op::watch: break;
  }
  LOCKSTEP_CHECK(false, "{} changes nothing", name(request.op));
}

Reply Table::set(const std::string& key, const std::string& value) {
  const auto found = entries_.find(key);
  const std::size_t old_bytes =
      found == entries_.end() ? 0 : kEntryBytes + key.size() + found->second.value.size();
  const std::size_t new_bytes = kEntryBytes + key.size() + value.size();
  // A value that shrinks always fits.
  if (new_bytes > old_bytes && held_bytes_ - old_bytes + new_bytes > capacity_bytes_)
    return {.status = Status::full, .number = static_cast<std::int64_t>(held_bytes_)};
  entries_[key] = {value, ++version_};
  held_bytes_ += new_bytes - old_bytes;
  return {};
}

Reply Table::compare_and_set(const Request& request) {
  const auto found = entries_.find(request.keys.front());
  const bool exists = found != entries_.end();
  if (exists != request.expected.has_value() ||
      (exists && found->second.value != *request.expected)) {
    Reply reply{.status = Status::different};
    if (exists) reply.values.push_back(found->second.value);
    return reply;
  }
  return set(request.keys.front(), request.value);
}

Reply Table::add(const Request& request) {
  std::int64_t sum = 0;
  if (const auto found = entries_.find(request.keys.front()); found != entries_.end()) {
    const std::string& text = found->second.value;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sum);
    if (error != std::errc() || end != text.data() + text.size())
      return {.status = Status::not_number, .values = {text}};
  }
  const std::int64_t before = sum;
  if (__builtin_add_overflow(sum, request.amount, &sum))
    return {.status = Status::overflow, .number = before};
  Reply reply = set(request.keys.front(), std::to_string(sum));
  if (reply.status == Status::ok) reply.number = sum;
  return reply;
}

Reply Table::remove(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return {.number = 0};
  held_bytes_ -= kEntryBytes + key.size() + found->second.value.size();
  entries_.erase(found);
  return {.number = 1};
}

std::optional<Reply> Table::look(Waiter& waiter) const {
  if (waiter.request.op == Op::wait) return look_for_all(waiter);
  waiter.blocker = waiter.request.keys.front();
  const auto found = entries_.find(waiter.blocker);
  if (found == entries_.end() || found->second.version <= waiter.request.seen) return std::nullopt;
  return Reply{.number = static_cast<std::int64_t>(found->second.version),
               .values = {found->second.value}};
}

std::optional<Reply> Table::look_for_all(Waiter& waiter) const {
  const auto& keys = waiter.request.keys;
  // Goes on from where the wait stood. At the end it looks once more from the start, because a key
  // that existed before may be gone.
  for (const bool again : {false, true}) {
    if (again) waiter.next = 0;
    for (; waiter.next < keys.size(); ++waiter.next) {
      if (entries_.contains(keys[waiter.next])) continue;
      waiter.blocker = keys[waiter.next];
      return std::nullopt;
    }
  }
  std::size_t bytes = 0;
  for (const std::string& key : keys) bytes += entries_.at(key).value.size();
  if (bytes > kMostValueBytes)
    return Reply{.status = Status::too_large, .number = static_cast<std::int64_t>(bytes)};
  Reply reply;
  reply.values.reserve(keys.size());
  for (const std::string& key : keys) reply.values.push_back(entries_.at(key).value);
  return reply;
}

Reply Table::expired(const Waiter& waiter) const {
  Reply reply{.status = Status::timeout};
  if (waiter.request.op == Op::watch) return reply;
  for (const std::string& key : waiter.request.keys)
    if (!entries_.contains(key)) reply.values.push_back(key);
  return reply;
}

void Table::park(Ticket ticket, Waiter waiter) {
  LOCKSTEP_CHECK(!waiters_.contains(ticket), "ticket {} waits already", ticket);
  behind_[waiter.blocker].insert(ticket);
  expiries_.emplace(waiter.until, ticket);
  waiters_.emplace(ticket, std::move(waiter));
}

void Table::wake(const std::string& key, std::vector<Answer>& answers) {
  const auto found = behind_.find(key);
  if (found == behind_.end()) return;
  const auto tickets = std::move(found->second);
  behind_.erase(found);
  for (const Ticket ticket : tickets) {
    Waiter& waiter = waiters_.at(ticket);
    auto reply = look(waiter);
    if (!reply) {
      behind_[waiter.blocker].insert(ticket);
      continue;
    }
    expiries_.erase({waiter.until, ticket});
    waiters_.erase(ticket);
    answers.push_back({ticket, std::move(*reply)});
  }
}

void Table::expire(Clock::time_point now, std::vector<Answer>& answers) {
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const Ticket ticket = expiries_.begin()->second;
    answers.push_back({ticket, expired(waiters_.at(ticket))});
    cancel(ticket);
  }
}

void Table::cancel(Ticket ticket) {
  const auto found = waiters_.find(ticket);
  if (found == waiters_.end()) return;
  const auto line = behind_.find(found->second.blocker);
  line->second.erase(ticket);
  if (line->second.empty()) behind_.erase(line);
  expiries_.erase({found->second.until, ticket});
  waiters_.erase(found);
}

std::optional<Clock::time_point> Table::next_expiry() const {
  if (expiries_.empty()) return std::nullopt;
  return expiries_.begin()->first;
}

}  // namespace lockstep::store

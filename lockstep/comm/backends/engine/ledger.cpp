#include <lockstep/comm/backends/engine/ledger.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <string_view>
#include <utility>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/log.h>

namespace lockstep::comm::backends {

namespace {

// How often the background thread looks for work; a mismatch found beside a call is at most this
// late.
constexpr milliseconds kTick(10);
// How long a roll call waits for answers. A live process answers in well under a millisecond; one
// that does not answer in this time is stopped, dead or starved.
constexpr milliseconds kRollCall(300);
// A store that does not answer one request in this time counts as lost.
constexpr milliseconds kStoreRequest(5000);
// How long a rank waits for the others when it leaves.
constexpr milliseconds kLeaveTogether(5000);
// Compared calls that stay in the store before rank 0 removes them.
constexpr std::uint64_t kUnswept = 256;

Deadline store_deadline() { return Deadline::after(kStoreRequest); }

std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// Takes the text up to the next newline off the front, and returns it.
std::string take_line(std::string_view& text) {
  const auto end = std::min(text.find('\n'), text.size());
  std::string line(text.substr(0, end));
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string encode(const CommError::Details& fault) {
  return fmt::format("{}\n{}\n{}\n{}\n{}", static_cast<int>(fault.fault), fault.operation,
                     fault.sequence, fmt::join(fault.ranks, " "), fault.explanation);
}

CommError::Details decode(std::string_view text, const std::string& group) {
  CommError::Details fault;
  fault.group = group;
  fault.fault = static_cast<Fault>(
      std::min<std::uint64_t>(number(take_line(text)), static_cast<int>(Fault::engine)));
  fault.operation = take_line(text);
  fault.sequence = number(take_line(text));
  std::string ranks = take_line(text);
  for (std::string_view rest = ranks; !rest.empty();) {
    const auto end = std::min(rest.find(' '), rest.size());
    fault.ranks.push_back(static_cast<int>(number(rest.substr(0, end))));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  fault.explanation = std::string(text);
  return fault;
}

CommError::Details details_of(const std::exception_ptr& error) {
  CommError::Details fault{.fault = Fault::engine, .operation = "comparing calls"};
  try {
    std::rethrow_exception(error);
  } catch (const CommError& comm_error) {
    fault = comm_error.details();
  } catch (const std::exception& other) {
    fault.explanation = other.what();
  } catch (...) {
    fault.explanation = "something was thrown that is no std::exception";
  }
  return fault;
}

}  // namespace

Ledger::Ledger(Options options) : options_(std::move(options)) {
  answer();
  writer_ = std::thread([this] { write(); });
  listener_ = std::thread([this] { listen(); });
}

Ledger::~Ledger() { close(Leave::at_once); }

void Ledger::close(Leave leave_how) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stopping_, true)) return;
  }
  changed_.notify_all();
  writer_.join();
  try {
    // Wakes our own listener.
    options_.store->set(key(fmt::format("bell{}", options_.rank)), "end", store_deadline());
  } catch (const Error&) {
    // The store is gone, so the listener's wait on it has ended.
  }
  listener_.join();
  try {
    leave(leave_how);
  } catch (const Error& error) {
    log::debug("ledger of '{}': keys stay behind: {}", options_.group, error.what());
  }
}

void Ledger::arrive(std::uint64_t position) {
  std::lock_guard lock(mutex_);
  arrived_ = std::max(arrived_, position);
}

void Ledger::compare(const Entry& entry, const Deadline& deadline) {
  const std::string where = key(entry.key);
  const std::string mine =
      fmt::format("{}\n{}\n{}{}", options_.rank, entry.digest.size(), entry.digest, entry.text);
  const std::string first = options_.store->compare_and_set(where, std::nullopt, mine, deadline);

  std::string_view rest = first;
  const int first_rank = static_cast<int>(number(take_line(rest)));
  const auto length = std::min<std::size_t>(number(take_line(rest)), rest.size());
  if (rest.substr(0, length) != entry.digest) {
    const std::string theirs(rest.substr(length));
    CommError::Details fault{
        .fault = Fault::mismatch,
        .operation = entry.operation,
        .group = options_.group,
        .sequence = entry.sequence,
        .ranks = {first_rank, options_.rank},
        .explanation =
            fmt::format("rank {} calls {}, but rank {} calls {}: all ranks of a group must "
                        "make the same calls in the same order",
                        first_rank, theirs, options_.rank, entry.text)};
    std::sort(fault.ranks.begin(), fault.ranks.end());
    throw CommError(std::move(fault));
  }
  if (entry.position == 0) {
    // An exchange has two sides; the second one removes the key.
    if (first_rank != options_.rank) options_.store->remove(where, deadline);
    return;
  }
  std::lock_guard lock(mutex_);
  compared_ = std::max(compared_, entry.position);
}

void Ledger::compare_later(Entry entry) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(entry));
}

CommError::Details Ledger::report(const CommError::Details& fault) {
  const std::string winner =
      options_.store->compare_and_set(key("fault"), std::nullopt, encode(fault), store_deadline());
  for (int rank = 0; rank < options_.size; ++rank)
    options_.store->set(key(fmt::format("bell{}", rank)), "fault", store_deadline());
  return decode(winner, options_.group);
}

Ledger::RollCall Ledger::call_roll(std::uint64_t position) {
  const auto roll =
      static_cast<std::uint64_t>(options_.store->add(key("roll"), 1, store_deadline()));
  for (int rank = 0; rank < options_.size; ++rank)
    if (rank != options_.rank)
      options_.store->set(key(fmt::format("bell{}", rank)), "roll", store_deadline());

  RollCall result;
  const Deadline deadline = Deadline::after(kRollCall);
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    std::string answer;
    for (;;) {
      answer = options_.store->get(key(fmt::format("at{}", rank)), store_deadline()).value_or("");
      if (number(answer) >= roll || deadline.passed()) break;
      std::this_thread::sleep_for(milliseconds(2));
    }
    std::string_view rest = answer;
    const bool answers = number(take_line(rest)) >= roll;
    if (!answers)
      result.silent.push_back(rank);
    else if (number(rest) < position)
      result.behind.push_back(rank);
  }
  return result;
}

// Called from a catch block of one of the threads, which no exception may leave.
void Ledger::thread_failed() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(faulty_, true)) return;
  }
  try {
    CommError::Details fault = details_of(std::current_exception());
    fault.group = options_.group;
    try {
      fault = report(fault);
    } catch (const Error&) {
      // The store is gone, so the other ranks cannot be told; this rank stops.
    }
    options_.on_fault(fault);
  } catch (const std::exception& error) {
    log::error("ledger of '{}': {}", options_.group, error.what());
  }
}

void Ledger::write() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, kTick, [this] { return stopping_; });
    std::vector<Entry> entries;
    entries.swap(queue_);
    const bool sweeping = options_.rank == 0 && compared_ >= swept_ + kUnswept;
    lock.unlock();
    try {
      for (const Entry& entry : entries) compare(entry, store_deadline());
      if (sweeping) sweep(store_deadline());
    } catch (...) {
      thread_failed();
    }
    try {
      if (options_.on_tick) options_.on_tick();
    } catch (...) {
      thread_failed();
    }
    lock.lock();
  }
}

void Ledger::listen() {
  const std::string bell = key(fmt::format("bell{}", options_.rank));
  std::uint64_t seen = 0;
  for (;;) {
    try {
      seen = options_.store->watch(bell, seen, Deadline::after(milliseconds(60'000))).version;
    } catch (const CommError& error) {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      if (error.fault() == Fault::timeout) continue;
      // Calls in flight may still end well; the next call to be compared finds the store gone.
      log::debug("ledger of '{}': {}", options_.group, error.what());
      return;
    } catch (...) {
      return thread_failed();
    }
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    try {
      answer();
      const auto fault = options_.store->get(key("fault"), store_deadline());
      if (!fault) continue;
      std::unique_lock lock(mutex_);
      if (std::exchange(faulty_, true)) continue;
      lock.unlock();
      options_.on_fault(decode(*fault, options_.group));
    } catch (const CommError& error) {
      log::debug("ledger of '{}': {}", options_.group, error.what());
    } catch (...) {
      thread_failed();
    }
  }
}

void Ledger::answer() {
  const std::string roll = options_.store->get(key("roll"), store_deadline()).value_or("0");
  std::unique_lock lock(mutex_);
  const std::string answer = fmt::format("{}\n{}\n{}", roll, arrived_, compared_);
  lock.unlock();
  options_.store->set(key(fmt::format("at{}", options_.rank)), answer, store_deadline());
}

void Ledger::sweep(const Deadline& deadline) {
  // A roll call makes every rank publish how far it is; an old answer is a lower bound.
  call_roll(0);
  std::uint64_t common = 0;
  for (int rank = 0; rank < options_.size; ++rank) {
    std::uint64_t compared = 0;
    if (rank == options_.rank) {
      std::lock_guard lock(mutex_);
      compared = compared_;
    } else {
      const std::string answer =
          options_.store->get(key(fmt::format("at{}", rank)), deadline).value_or("");
      std::string_view rest = answer;
      take_line(rest);
      take_line(rest);
      compared = number(rest);
    }
    common = rank == 0 ? compared : std::min(common, compared);
  }
  for (; swept_ < common; ++swept_)
    options_.store->remove(key(fmt::format("c{}", swept_ + 1)), deadline);
  options_.store->set(key("swept"), std::to_string(swept_), deadline);
}

void Ledger::leave(Leave leave) {
  const Deadline deadline = store_deadline();
  auto& store = *options_.store;
  store.remove(key(fmt::format("at{}", options_.rank)), deadline);
  store.remove(key(fmt::format("bell{}", options_.rank)), deadline);
  if (store.add(key("left"), 1, deadline) < options_.size) {
    const Deadline patience = Deadline::after(kLeaveTogether);
    while (leave == Leave::together && !patience.passed()) {
      const auto left = store.get(key("left"), deadline);
      // The last one removes the key.
      if (!left || number(*left) >= static_cast<std::uint64_t>(options_.size)) break;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return;
  }
  const auto swept = number(store.get(key("swept"), deadline).value_or("0"));
  for (std::uint64_t position = swept + 1; position <= compared_; ++position)
    store.remove(key(fmt::format("c{}", position)), deadline);
  for (const char* shared : {"left", "swept", "roll", "fault"}) store.remove(key(shared), deadline);
  // Removes the bells that were rung for ranks that had left already.
  for (int rank = 0; rank < options_.size; ++rank)
    store.remove(key(fmt::format("bell{}", rank)), deadline);
}

}  // namespace lockstep::comm::backends

#include <lockstep/comm/backends/engine/engine_group.h>

#include <algorithm>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/call.h>
#include <lockstep/device/backward_thread.h>
#include <lockstep/flight/journal.h>

namespace lockstep::comm::backends {

namespace {

// The tensors whose lengths must agree between ranks although the fingerprint does not hold them.
const std::vector<at::Tensor>& agreed_tensors(const Call& call) {
  return call.fingerprint.operation == Operation::reduce_scatter ? call.inputs : call.outputs;
}

void append_bytes(std::string& digest, const void* bytes, std::size_t size) {
  digest.append(static_cast<const char*>(bytes), size);
}

std::vector<int> peers_of(const Call& call) {
  std::vector<int> peers;
  for (const Transfer& transfer : call.transfers) peers.push_back(transfer.peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  return a;
}

}  // namespace

EngineCall::EngineCall(std::shared_ptr<EngineGroup> group, Call call, std::uint64_t position)
    : group_(std::move(group)),
      call_(std::move(call)),
      position_(position),
      peers_(peers_of(call_)) {}

bool EngineCall::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void EngineCall::wait_on_host(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto begin = done_ ? Clock::time_point() : Clock::now();
  const bool callers_comes_first = deadline.at() < call_.deadline.at();
  const auto until = std::min(deadline.at(), call_.deadline.at());
  // A thread whose own deadline comes before the call's is not blocked by this call: it may do
  // something else then.
  const device::AsBackwardThread caller;
  std::optional<flight::Recorder::Block> block;
  if (!callers_comes_first && !done_ && call_.flight_entry != 0)
    block.emplace(group_->recorder(), call_.flight_entry);
  if (!changed_.wait_until(lock, until, [this] { return done_; })) {
    lock.unlock();
    group_->time_out(*this,
                     callers_comes_first ? deadline.span_seconds() : call_.deadline.span_seconds());
    lock.lock();
    // The failure of a group reaches every call in flight before time_out returns, unless another
    // thread is about to do it.
    changed_.wait(lock, [this] { return done_; });
  }
  if (begin != Clock::time_point())
    group_->info().journal->add_waited(std::chrono::nanoseconds(Clock::now() - begin).count());
  if (fault_) throw CommError(*fault_);
}

void EngineCall::wait() { wait_on_host(call_.deadline); }

void EngineCall::start() { group_->mark(call_, flight::State::started); }

void EngineCall::finish() {
  {
    std::lock_guard lock(mutex_);
    if (done_) return;
    group_->mark(call_, flight::State::finished);
    call_.inputs.clear();
    call_.outputs.clear();
    call_.transfers.clear();
    done_ = true;
  }
  changed_.notify_all();
  group_->forget(this);
}

void EngineCall::fail(const CommError::Details& fault) {
  {
    std::lock_guard lock(mutex_);
    if (done_) return;
    group_->mark(call_, flight::State::failed);
    fault_ = fault;
    done_ = true;
  }
  changed_.notify_all();
}

EngineGroup::EngineGroup(GroupInfo info, std::string backend,
                         std::shared_ptr<flight::Recorder> recorder, LedgerMode mode)
    : info_(std::move(info)),
      backend_(std::move(backend)),
      recorder_(std::move(recorder)),
      mode_(mode) {}

void EngineGroup::open(const EngineOptions& options, const std::string& prefix,
                       std::function<void()> interrupt, std::function<void()> tick) {
  interrupt_ = std::move(interrupt);
  if (size() == 1) return;
  ledger_ = std::make_unique<Ledger>(Ledger::Options{
      .store = options.store,
      .prefix = prefix,
      .group = info_.name,
      .rank = info_.rank,
      .size = size(),
      .on_fault = [this](const CommError::Details& fault) { die(fault); },
      .on_tick =
          [this, tick = std::move(tick)] {
            if (tick) tick();
            check_deadlines();
          },
  });
  if (info_.watch != nullptr)
    watched_ = info_.watch->watch(prefix, recorder_,
                                  [this](CommError::Details fault) { fail(std::move(fault)); });
}

void EngineGroup::close() {
  std::unique_lock lock(mutex_);
  const bool busy = std::any_of(in_flight_.begin(), in_flight_.end(),
                                [](const auto& call) { return !call->done(); });
  lock.unlock();
  const CommError::Details gone{
      .fault = Fault::aborted,
      .operation = "a call",
      .group = info_.name,
      .ranks = {info_.rank},
      .explanation =
          fmt::format("rank {} destroyed its communicator with calls in flight", info_.rank)};
  if (busy) fail(gone);
  lock.lock();
  auto watched = std::move(watched_);
  lock.unlock();
  watched.reset();
  if (ledger_) ledger_->close(dead() ? Ledger::Leave::at_once : Ledger::Leave::together);
  lock.lock();
  if (!fault_) fault_ = gone;
}

bool EngineGroup::dead() const {
  std::lock_guard lock(mutex_);
  return fault_.has_value();
}

void EngineGroup::check_alive(const char* operation) {
  check_deadlines();
  std::lock_guard lock(mutex_);
  if (!fault_) return;
  CommError::Details details = *fault_;
  details.explanation = fmt::format("{} cannot be called, the group has failed before: {}",
                                    operation, fault_->explanation);
  throw CommError(std::move(details));
}

std::vector<Ledger::Entry> EngineGroup::entries(const Call& call, std::uint64_t position) const {
  std::vector<Ledger::Entry> result;
  Fingerprint fingerprint = call.fingerprint;
  fingerprint.algorithm = Algorithm::automatic;  // the engine's own business
  if (fingerprint.operation == Operation::exchange) {
    for (std::size_t i = 0; i < call.transfers.size(); ++i) {
      const Transfer& transfer = call.transfers[i];
      const bool sends = transfer.direction == Transfer::Direction::send;
      fingerprint.sequence = call.transfer_sequences[i];
      fingerprint.count = static_cast<std::uint64_t>(transfer.tensor.numel());
      fingerprint.dtype = dtype_of(transfer.tensor.scalar_type());
      fingerprint.tensors = 1;
      Ledger::Entry entry;
      entry.key = fmt::format("x{}-{}.{}", sends ? info_.rank : transfer.peer,
                              sends ? transfer.peer : info_.rank, fingerprint.sequence);
      append_bytes(entry.digest, &fingerprint, sizeof(fingerprint));
      entry.text = fmt::format("{} {} rank {}", fingerprint.text_with_subject(),
                               sends ? "to" : "from", transfer.peer);
      entry.operation = name(Operation::exchange);
      entry.sequence = fingerprint.sequence;
      result.push_back(std::move(entry));
    }
    return result;
  }
  Ledger::Entry entry;
  entry.key = fmt::format("c{}", position);
  append_bytes(entry.digest, &fingerprint, sizeof(fingerprint));
  entry.text = fingerprint.text_with_subject();
  entry.operation = name(fingerprint.operation);
  entry.sequence = fingerprint.sequence;
  entry.position = position;
  // The parts of an all_to_all may differ from pair to pair; in every other call they agree.
  const auto& tensors = agreed_tensors(call);
  if (tensors.size() > 1 && fingerprint.operation != Operation::all_to_all) {
    std::vector<std::int64_t> lengths;
    for (const at::Tensor& tensor : tensors) lengths.push_back(tensor.numel());
    append_bytes(entry.digest, lengths.data(), lengths.size() * sizeof(lengths[0]));
    if (lengths.size() <= 16)
      entry.text += fmt::format(" of {} elements", fmt::join(lengths, ", "));
  }
  result.push_back(std::move(entry));
  return result;
}

std::shared_ptr<EngineCall> EngineGroup::begin(Call call) {
  const bool in_order = call.fingerprint.operation != Operation::exchange;
  const std::uint64_t position = in_order ? ++position_ : 0;
  auto pending = std::make_shared<EngineCall>(shared_from_this(), std::move(call), position);
  if (ledger_) {
    if (in_order) ledger_->arrive(position);
    if (mode_ == LedgerMode::beside)
      for (Ledger::Entry& entry : entries(pending->call(), position))
        ledger_->compare_later(std::move(entry));
  }
  return pending;
}

std::shared_ptr<EngineCall> EngineGroup::begin_split(const SplitRequest& request,
                                                     Deadline deadline) {
  Call call;
  call.fingerprint = {
      .sequence = request.number, .generation = info_.generation, .operation = Operation::split};
  call.deadline = deadline;
  auto pending = begin(std::move(call));
  track(pending);
  return pending;
}

void EngineGroup::track(std::shared_ptr<EngineCall> call) {
  std::unique_lock lock(mutex_);
  if (fault_) {
    const CommError::Details fault = *fault_;
    lock.unlock();
    call->fail(fault);
    return;
  }
  in_flight_.push_back(std::move(call));
}

void EngineGroup::forget(const EngineCall* call) {
  std::shared_ptr<EngineCall> last;  // released after the lock is
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [&](const auto& each) { return each.get() == call; });
  if (found == in_flight_.end()) return;
  last = std::move(*found);
  in_flight_.erase(found);
}

void EngineGroup::compare(const EngineCall& call) {
  if (!ledger_ || mode_ != LedgerMode::before) return;
  for (const Ledger::Entry& entry : entries(call.call(), call.position()))
    ledger_->compare(entry, call.call().deadline);
}

CommError::Details EngineGroup::describe(const Call& call, Fault fault) const {
  return {.fault = fault,
          .operation = name(call.fingerprint.operation),
          .group = info_.name,
          .sequence = call.fingerprint.sequence};
}

void EngineGroup::engine_failed(const EngineCall& call, const std::string& text) {
  if (dead()) return;
  CommError::Details fault = describe(call.call(), Fault::engine);
  fault.explanation = fmt::format("{} reports: {}", backend_, engine_text(text));
  try {
    // Most often another process has died: name it.
    if (ledger_) fault.ranks = ledger_->call_roll(0).silent;
    if (!fault.ranks.empty())
      fault.explanation = fmt::format("{} {} not answer any more; {}", list_ranks(fault.ranks),
                                      fault.ranks.size() == 1 ? "does" : "do", fault.explanation);
  } catch (const Error&) {
    // The roll call needs the store. Without it the engine's own text has to do.
  }
  fail(std::move(fault));
}

void EngineGroup::time_out(const EngineCall& call, double seconds) {
  if (dead()) return;
  CommError::Details fault = describe(call.call(), Fault::timeout);
  std::string reason = "the other ranks could not be asked where they are";
  try {
    if (ledger_ && call.position() != 0) {
      const auto roll = ledger_->call_roll(call.position());
      fault.ranks = joined(roll.silent, roll.behind);
      reason = fault.ranks.empty() ? fmt::format("every rank has made the call, but {} has not "
                                                 "completed it",
                                                 backend_)
                                   : "";
      if (!roll.behind.empty())
        reason += fmt::format("{} {} not made this call", list_ranks(roll.behind),
                              roll.behind.size() == 1 ? "has" : "have");
      if (!roll.silent.empty())
        reason += fmt::format("{}{} {} not answer", reason.empty() ? "" : "; ",
                              list_ranks(roll.silent), roll.silent.size() == 1 ? "does" : "do");
    } else if (ledger_) {
      // Only the peers of an exchange can tell whose part is missing, so the error names all of
      // them; they are few.
      fault.ranks = call.peers();
      reason = fmt::format("{} did not do their part of it", list_ranks(fault.ranks));
      const auto silent = ledger_->call_roll(0).silent;
      if (!silent.empty())
        reason += fmt::format("; {} {} not answer", list_ranks(silent),
                              silent.size() == 1 ? "does" : "do");
    }
  } catch (const Error& error) {
    reason = fmt::format("the other ranks could not be asked where they are ({})", error.what());
  }
  fault.explanation = fmt::format("{} was not over after {:.1f} s: {}",
                                  call.call().fingerprint.text(), seconds, reason);
  fail(std::move(fault));
}

void EngineGroup::fail(CommError::Details fault) {
  if (dead()) return;
  if (auto verdict = this->verdict()) {
    verdict->operation = std::move(fault.operation);
    verdict->group = info_.name;
    verdict->sequence = fault.sequence;
    fault = std::move(*verdict);
  }
  if (ledger_) {
    try {
      fault = ledger_->report(fault);
    } catch (const Error& error) {
      log::warn("the other ranks of '{}' could not be told of a failure: {}", info_.name,
                error.what());
    }
  }
  die(fault);
}

std::optional<CommError::Details> EngineGroup::verdict() const {
  std::lock_guard lock(mutex_);
  return watched_ ? watched_->verdict() : std::nullopt;
}

void EngineGroup::die(const CommError::Details& fault) {
  const CommError error = info_.error(fault);
  std::list<std::shared_ptr<EngineCall>> failed;
  {
    std::lock_guard lock(mutex_);
    if (fault_) return;
    fault_ = error.details();
    failed.swap(in_flight_);
  }
  // Writes the journal before any waiting thread hears of the failure, because the program may end
  // at once.
  info_.journal->group_failed(
      *recorder_,
      {.reason = error.what(), .fault = fault_name(fault.fault), .at_fault = error.global_ranks()},
      flight::Journal::FoundBy::this_rank);
  for (const auto& call : failed) call->fail(error.details());
  if (interrupt_) interrupt_();
}

void EngineGroup::check_deadlines() {
  std::shared_ptr<EngineCall> late;
  {
    std::lock_guard lock(mutex_);
    for (const auto& call : in_flight_)
      if (call->overdue()) {
        late = call;
        break;
      }
  }
  if (late) time_out(*late, late->call().deadline.span_seconds());
}

}  // namespace lockstep::comm::backends

#include <lockstep/comm/backends/engine/host_communicator.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

namespace lockstep::comm::backends {

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::submit(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (jobs_.size() > idle_ && threads_.size() < most_) threads_.emplace_back([this] { work(); });
  }
  changed_.notify_one();
}

void WorkerPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

namespace {

// Exchanges that wait at the same time; further ones queue up behind them.
constexpr std::size_t kMostExchanges = 256;

using Tensors = std::vector<at::Tensor>;

// Returns one tensor with all the bytes: the list's only tensor itself, or a copy of the list's
// contents.
at::Tensor joined_bytes(const Tensors& tensors) {
  if (tensors.size() == 1) return byte_alias(tensors.front());
  Tensors bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(byte_alias(tensor));
  return at::cat(bytes);
}

// Returns one tensor that receives all the bytes: the list's only tensor itself, or a new one whose
// contents are then copied to the list.
at::Tensor landing_bytes(const Tensors& tensors) {
  if (tensors.size() == 1) return byte_alias(tensors.front());
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += static_cast<std::int64_t>(tensor.nbytes());
  return at::empty({total}, at::kByte);
}

void scatter_bytes(const at::Tensor& bytes, const Tensors& tensors) {
  if (tensors.size() == 1) return;
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor target = byte_alias(tensor);
    target.copy_(bytes.narrow(0, at, target.numel()));
    at += target.numel();
  }
}

// The number of bytes of each rank's part; a single tensor is cut evenly.
std::vector<std::int64_t> part_bytes(const Tensors& tensors, int num_ranks) {
  std::vector<std::int64_t> parts;
  if (tensors.size() == 1 && num_ranks > 1) {
    parts.assign(static_cast<std::size_t>(num_ranks),
                 static_cast<std::int64_t>(tensors.front().nbytes()) / num_ranks);
    return parts;
  }
  for (const at::Tensor& tensor : tensors)
    parts.push_back(static_cast<std::int64_t>(tensor.nbytes()));
  return parts;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  std::int64_t total = 0;
  for (const std::int64_t value : values) total += value;
  return total;
}

void all_gather(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const at::Tensor input = byte_alias(call.inputs.front());
  const auto parts = part_bytes(call.outputs, num_ranks);
  if (sum(parts) == 0) return;
  const bool even = std::all_of(parts.begin(), parts.end(),
                                [&](std::int64_t part) { return part == parts.front(); });
  if (even && parts.front() <= kLargestPieceBytes) {
    const at::Tensor whole = landing_bytes(call.outputs);
    engine.all_gather(whole, input, call.deadline);
    scatter_bytes(whole, call.outputs);
    return;
  }
  // The parts have any lengths, so each rank broadcasts its own in turn.
  std::int64_t at = 0;
  for (int root = 0; root < num_ranks; ++root) {
    const auto part = static_cast<std::size_t>(root);
    const at::Tensor target = call.outputs.size() == 1
                                  ? byte_alias(call.outputs.front()).narrow(0, at, parts[part])
                                  : byte_alias(call.outputs[part]);
    at += parts[part];
    if (root == group.rank && target.data_ptr() != input.data_ptr()) target.copy_(input);
    if (parts[part] > 0) engine.broadcast(target, root, call.deadline);
  }
}

// Only the two ranks of a pair know the lengths. A rank asks for the length of what it is about to
// receive, because some engines end the process when a message does not fit.
void check_lengths(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const auto num_ranks = group.global_ranks.size();
  at::Tensor sent = at::empty({static_cast<std::int64_t>(num_ranks)}, at::kLong);
  at::Tensor expected = at::empty_like(sent);
  for (std::size_t rank = 0; rank < num_ranks; ++rank)
    sent.data_ptr<std::int64_t>()[rank] = call.inputs[rank].numel();
  const std::vector<std::int64_t> eight_each(num_ranks, sizeof(std::int64_t));
  engine.all_to_all(byte_alias(expected), byte_alias(sent), eight_each, eight_each, call.deadline);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t coming = expected.data_ptr<std::int64_t>()[rank];
    const std::int64_t room = call.outputs[rank].numel();
    if (coming == room) continue;
    const int peer = static_cast<int>(rank);
    throw CommError({.fault = Fault::mismatch,
                     .operation = name(call.fingerprint.operation),
                     .group = group.name,
                     .sequence = call.fingerprint.sequence,
                     .ranks = {std::min(peer, group.rank), std::max(peer, group.rank)},
                     .explanation = fmt::format(
                         "in {}, rank {} sends {} elements to rank {}, whose outputs[{}] has {}",
                         call.fingerprint.text(), peer, coming, group.rank, peer, room)});
  }
}

void all_to_all(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const auto output_parts = part_bytes(call.outputs, num_ranks);
  const auto input_parts = part_bytes(call.inputs, num_ranks);
  if (call.inputs.size() > 1)
    check_lengths(engine, call, group);
  else if (sum(input_parts) == 0)
    return;
  const at::Tensor input = joined_bytes(call.inputs);
  const at::Tensor output = landing_bytes(call.outputs);
  engine.all_to_all(output, input, output_parts, input_parts, call.deadline);
  scatter_bytes(output, call.outputs);
}

// Every rank receives all ranks' versions of its part and reduces them itself. That puts as many
// bytes on the wire as any other way; 16-bit numbers travel as such and are still added in float32.
void reduce_scatter(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const auto input_parts = part_bytes(call.inputs, num_ranks);
  if (sum(input_parts) == 0) return;
  const at::Tensor& mine = call.outputs.front();
  const std::vector<std::int64_t> output_parts(static_cast<std::size_t>(num_ranks),
                                               static_cast<std::int64_t>(mine.nbytes()));
  const at::Tensor parts =
      at::empty({num_ranks, mine.numel()}, at::TensorOptions().dtype(mine.scalar_type()));
  engine.all_to_all(byte_alias(parts), joined_bytes(call.inputs), output_parts, input_parts,
                    call.deadline);
  if (mine.numel() > 0)
    reduce_locally(parts.unbind(0), call.fingerprint.reduce_op, divisor_of(call, num_ranks), mine);
}

void all_reduce(HostEngine& engine, const Call& call, const GroupInfo& group) {
  if (call.fingerprint.count == 0) return;
  const ReduceOp op = call.fingerprint.reduce_op;
  const Carrier carrier = carry(call.outputs, op);
  engine.all_reduce(carrier.tensor, carrier.op, call.deadline);
  restore(carrier, op, divisor_of(call, static_cast<int>(group.global_ranks.size())), call.outputs);
}

// A sum over one rank, or a broadcast from it, leaves the tensors as they are.
void run_alone(const Call& call) {
  if (!call.inputs.empty()) {
    const at::Tensor& input = call.inputs.front();
    const at::Tensor& output = call.outputs.front();
    if (input.numel() > 0 && input.data_ptr() != output.data_ptr())
      flat_alias(output).copy_(flat_alias(input));
  }
  const double divisor = divisor_of(call, 1);
  if (divisor == 1) return;
  for (const at::Tensor& tensor : call.outputs)
    reduce_locally({flat_alias(tensor)}, ReduceOp::mean, divisor, tensor);
}

// Runs any call but an exchange; `engine` is null for a group of one. Throws the engine's
// exceptions, and CommError (mismatch) if the parts of an all_to_all do not fit.
void run_collective(HostEngine* engine, const Call& call, const GroupInfo& group) {
  if (engine == nullptr) return run_alone(call);
  switch (call.fingerprint.operation) {
    case Operation::all_reduce: return all_reduce(*engine, call, group);
    case Operation::all_gather: return all_gather(*engine, call, group);
    case Operation::reduce_scatter: return reduce_scatter(*engine, call, group);
    case Operation::all_to_all: return all_to_all(*engine, call, group);
    case Operation::broadcast:
      for (const at::Tensor& tensor : call.outputs)
        if (tensor.numel() > 0)
          engine->broadcast(byte_alias(tensor), call.fingerprint.root, call.deadline);
      return;
    case Operation::barrier: return engine->barrier(call.deadline);
    case Operation::exchange:
    case Operation::split: break;
  }
  LOCKSTEP_CHECK(false, "{} is no collective", name(call.fingerprint.operation));
}

// The group of the ranks that asked for the same color as this one. `wishes` holds every rank's
// color and key, two numbers each.
GroupInfo plan_split(const GroupInfo& parent, const SplitRequest& request,
                     const std::int64_t* wishes) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < parent.global_ranks.size(); ++rank)
    if (wishes[2 * rank] == request.color) members.push_back(static_cast<int>(rank));
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return wishes[2 * a + 1] < wishes[2 * b + 1]; });

  GroupInfo child{.name = request.name,
                  .generation = parent.generation,
                  .journal = parent.journal,
                  .watch = parent.watch};
  child.global_ranks.clear();
  for (const int member : members) {
    if (member == parent.rank) child.rank = static_cast<int>(child.global_ranks.size());
    child.global_ranks.push_back(parent.global_ranks[static_cast<std::size_t>(member)]);
  }
  return child;
}

}  // namespace

std::string claim_prefix(const GroupInfo& group, const std::string& backend,
                         const EngineOptions& options) {
  if (group.global_ranks.size() == 1) return "";
  if (!options.store)
    throw UsageError("the engine '{}' needs the job's store to connect the {} ranks of '{}': start "
                     "the program with lockstep run, torchrun or mpirun",
                     backend, group.global_ranks.size(), group.name);
  // The key names the members, so that ranks outside the group do not have to count it.
  const std::string members = fmt::format("{}", fmt::join(group.global_ranks, ","));
  const std::string base = fmt::format("engines/{}/{}.{}.{:x}", backend, group.name,
                                       group.generation, hash_text(members));
  const auto turn = options.store->add(fmt::format("{}/made{}", base, group.rank), 1,
                                       Deadline::after(options.timeout));
  return fmt::format("{}/{}", base, turn);
}

void gather_ranks(const GroupInfo& group, const std::string& backend, store::Store& store,
                  const std::string& prefix, const Deadline& deadline) {
  std::vector<std::string> keys;
  for (std::size_t rank = 0; rank < group.global_ranks.size(); ++rank)
    keys.push_back(fmt::format("{}/here{}", prefix, rank));
  store.set(keys[static_cast<std::size_t>(group.rank)], "here", deadline);
  try {
    store.wait(keys, deadline);
  } catch (const CommError& error) {
    if (error.fault() != Fault::timeout) throw;
    std::vector<int> missing;
    for (std::size_t rank = 0; rank < keys.size(); ++rank)
      if (!store.get(keys[rank], Deadline::after(milliseconds(5000))))
        missing.push_back(static_cast<int>(rank));
    throw group.error(
        {.fault = Fault::timeout,
         .operation = "connecting " + backend,
         .ranks = missing,
         .explanation = fmt::format("after {:.1f} s {} had not come to form the group",
                                    deadline.span_seconds(), list_ranks(missing))});
  }
}

HostCommunicator::HostCommunicator(GroupInfo info, std::string backend,
                                   std::unique_ptr<HostEngine> engine, const EngineOptions& options,
                                   std::string prefix)
    : Communicator(std::move(info), options.timeout),
      backend_(std::move(backend)),
      options_(options),
      prefix_(std::move(prefix)),
      engine_(std::move(engine)),
      group_(
          std::make_shared<EngineGroup>(this->info(), backend_, shared_recorder(), options.ledger)),
      collectives_(std::make_unique<WorkerPool>(1)),
      exchanges_(std::make_unique<WorkerPool>(kMostExchanges)) {
  group_->open(
      options_, prefix_,
      [this] {
        if (engine_) engine_->interrupt();
      },
      nullptr);
}

HostCommunicator::~HostCommunicator() {
  // Fails the calls in flight: nobody is left to wait for them.
  group_->close();
  collectives_.reset();
  exchanges_.reset();
  engine_.reset();
}

void HostCommunicator::perform(EngineCall& call, const std::function<void()>& work) {
  if (call.done()) return;
  call.start();
  try {
    group_->compare(call);
    work();
    call.finish();
  } catch (const CommError& error) {
    CommError::Details fault = error.details();
    if (fault.fault == Fault::mismatch) return group_->fail(std::move(fault));
    // The store threw this error, so it does not name the call yet.
    fault.operation = comm::name(call.call().fingerprint.operation);
    fault.group = group_->info().name;
    fault.sequence = call.call().fingerprint.sequence;
    group_->fail(std::move(fault));
  } catch (const std::exception& error) {
    const Deadline& deadline = call.call().deadline;
    if (deadline.passed())
      group_->time_out(call, deadline.span_seconds());
    else
      group_->engine_failed(call, error.what());
  } catch (...) {
    group_->engine_failed(call, "something was thrown that is no std::exception");
  }
}

std::shared_ptr<PendingCall> HostCommunicator::do_start(Call call) {
  group_->check_alive(comm::name(call.fingerprint.operation));
  auto pending = group_->begin(std::move(call));
  group_->track(pending);
  if (pending->call().fingerprint.operation == Operation::exchange) {
    exchanges_->submit([this, pending] {
      const Call& exchange = pending->call();
      perform(*pending, [&] {
        // A group of one has no engine, and nobody to exchange with.
        if (!exchange.transfers.empty())
          engine_->exchange(exchange.transfers, exchange.transfer_sequences, exchange.deadline);
      });
    });
  } else {
    collectives_->submit([this, pending] {
      perform(*pending, [&] { run_collective(engine_.get(), pending->call(), info()); });
    });
  }
  return pending;
}

std::shared_ptr<Communicator> HostCommunicator::do_split(const SplitRequest& request,
                                                         Deadline deadline) {
  group_->check_alive("split");
  auto pending = group_->begin_split(request, deadline);
  // This frame may be gone before the job runs, if the wait below ends first; so the result is
  // shared.
  auto result = std::make_shared<std::shared_ptr<Communicator>>();
  collectives_->submit([this, pending, request, deadline, result] {
    perform(*pending, [&] { *result = form(request, deadline); });
  });
  pending->wait_on_host(deadline);
  return *result;
}

std::shared_ptr<Communicator> HostCommunicator::form(const SplitRequest& request,
                                                     const Deadline& deadline) {
  const at::Tensor mine = at::empty({2}, at::kLong);
  mine.data_ptr<std::int64_t>()[0] = request.color;
  mine.data_ptr<std::int64_t>()[1] = request.key;
  const at::Tensor all = at::empty({size(), 2}, at::kLong);
  if (engine_)
    engine_->all_gather(byte_alias(all), byte_alias(mine), deadline);
  else
    all.copy_(mine.unsqueeze(0));
  GroupInfo child = plan_split(info(), request, all.data_ptr<std::int64_t>());
  const bool in_one = request.color >= 0;
  const std::string prefix = fmt::format("{}/s{}.{}", prefix_, request.number, request.color);
  std::unique_ptr<HostEngine> engine;
  if (engine_)
    engine =
        engine_->split(in_one ? &child : nullptr, request.color, request.key, prefix, deadline);
  if (!in_one) return nullptr;
  EngineOptions options = options_;
  options.timeout = timeout();
  return std::make_shared<HostCommunicator>(std::move(child), backend_, std::move(engine), options,
                                            prefix);
}

void HostCommunicator::do_abort(const std::string& reason) {
  group_->fail({.fault = Fault::aborted,
                .operation = "abort",
                .group = name(),
                .ranks = {rank()},
                .explanation = fmt::format("rank {} ended the group: {}", rank(), reason)});
}

at::Tensor HostCommunicator::do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

void HostCommunicator::do_check(Operation operation, const at::Tensor& tensor) const {
  if (tensor.device().is_cpu()) return;
  throw UsageError("{}: the tensor is on {}, but {} moves tensors in host memory only: use the "
                   "backend nccl, shm or tcp for this device, or move the tensor with .cpu()",
                   comm::name(operation), tensor.device().str(), backend_);
}

}  // namespace lockstep::comm::backends

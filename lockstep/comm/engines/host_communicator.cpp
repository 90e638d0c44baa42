#include <lockstep/comm/engines/host_communicator.h>

#include <ATen/ATen.h>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/comm/engines/host_collectives.h>
#include <lockstep/comm/engines/split_plan.h>

namespace lockstep::comm::engines {

namespace {

// Exchanges that wait at once; more queue up behind them.
constexpr std::size_t kMostExchanges = 256;

LedgerMode mode_for(const std::string& backend, LedgerMode wanted) {
  if (wanted != LedgerMode::automatic) return wanted;
  return backend == "gloo" ? LedgerMode::before : LedgerMode::beside;
}

}  // namespace

std::string claim_prefix(const GroupInfo& group, const std::string& backend,
                         const EngineOptions& options) {
  if (group.global_ranks.size() == 1) return "";
  if (!options.store)
    throw UsageError("the engine '{}' needs the job's store to connect the {} ranks of '{}': start "
                     "the program with lockstep run, torchrun or mpirun",
                     backend, group.global_ranks.size(), group.name);
  // Who is in it, so that ranks that are not do not have to count it.
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
      group_(std::make_shared<EngineGroup>(this->info(), backend_, shared_recorder(),
                                           mode_for(backend_, options.ledger))),
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
  // Whatever is in flight has nobody left to wait for it.
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
    // The store's: it says nothing of this call yet.
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
        // Alone in a group there is no engine, and nobody to exchange with.
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
  // The result belongs to this frame, which may be gone if the wait below ends first.
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

}  // namespace lockstep::comm::engines

#include <lockstep/comm/backends/native/transport_communicator.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/base/log.h>
#include <lockstep/comm/algorithms/collectives.h>
#include <lockstep/comm/backends/native/calls.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/transport/wait_watch.h>
#include <lockstep/flight/journal.h>

namespace lockstep::comm::backends {

namespace {

// How long a lane may take to connect.
constexpr milliseconds kLaneTimeout{120'000};
// Tensors of one coalesced call are packed into one message up to this size.
constexpr std::size_t kPackBytes = 256u << 10;

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()),
          static_cast<std::size_t>(tensor.numel()) * tensor.element_size()};
}

// Returns one span for each rank: the tensors' memory, or equal parts of the only tensor's.
std::vector<Bytes> parts_of(const std::vector<at::Tensor>& tensors, int num_ranks) {
  std::vector<Bytes> parts;
  if (tensors.size() == 1 && num_ranks > 0) {
    const Bytes whole = bytes_of(tensors.front());
    const std::size_t size = whole.size() / static_cast<std::size_t>(num_ranks);
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(num_ranks); ++rank)
      parts.push_back(whole.subspan(rank * size, size));
  } else {
    for (const at::Tensor& tensor : tensors) parts.push_back(bytes_of(tensor));
  }
  return parts;
}

// Counts how long callers wait. A group of one counts nothing: nobody waits there, and reading the
// clock would cost time. The journal is shared, because a call may be waited for when its
// communicator is gone.
std::function<void(Clock::duration)> waits_of(const GroupInfo& group) {
  if (group.global_ranks.size() == 1) return nullptr;
  return [journal = group.journal](Clock::duration waited) {
    journal->add_waited(std::chrono::nanoseconds(waited).count());
  };
}

// A job that runs in the order of the group's calls and that nobody waits for.
class Errand final : public Job {
 public:
  Errand(Deadline deadline, std::function<void()> run) : Job(deadline), run_(std::move(run)) {}

 private:
  void run() override { run_(); }
  void let_go() noexcept override { run_ = nullptr; }

  std::function<void()> run_;
};

// One side of a transfer: the peer, and the fingerprint that both sides compare.
struct TransferSide {
  int peer = 0;
  bool sends = false;
  Fingerprint fingerprint;
};

// An exchange, or an all_to_all whose parts may differ, has to agree between pairs of ranks only:
// these are the pairs of this rank.
std::vector<TransferSide> sides_of(const Call& call, int rank) {
  std::vector<TransferSide> sides;
  if (call.fingerprint.operation == Operation::all_to_all && call.inputs.size() > 1)
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      const int peer = static_cast<int>(i);
      if (peer == rank) continue;
      for (const bool sends : {true, false}) {
        Fingerprint one = call.fingerprint;
        one.count = static_cast<std::uint64_t>((sends ? call.inputs : call.outputs)[i].numel());
        sides.push_back({peer, sends, one});
      }
    }
  for (std::size_t i = 0; i < call.transfers.size(); ++i) {
    const Transfer& transfer = call.transfers[i];
    Fingerprint one = call.fingerprint;
    one.sequence = call.transfer_sequences[i];
    one.count = static_cast<std::uint64_t>(transfer.tensor.numel());
    one.dtype = dtype_of(transfer.tensor.scalar_type());
    one.tensors = 1;
    sides.push_back({transfer.peer, transfer.direction == Transfer::Direction::send, one});
  }
  return sides;
}

class TransportCommunicator final : public Communicator, public CallRunner {
 public:
  TransportCommunicator(std::shared_ptr<Endpoint> endpoint, const GroupInfo& group,
                        std::string group_id, std::vector<EndpointAddress> addresses,
                        const TransportOptions& options)
      : Communicator(group, options.timeout),
        endpoint_(std::move(endpoint)),
        group_id_(std::move(group_id)),
        addresses_(std::move(addresses)),
        options_(options),
        transport_(connect_group(endpoint_,
                                 {.group_id = group_id_,
                                  .group_name = group.name,
                                  .rank = group.rank,
                                  .addresses = addresses_},
                                 options.media, Deadline::after(options.timeout))),
        executor_(std::make_shared<Executor>(
            [this](const std::exception_ptr& error) { tell_all(error); }, waits_of(info()))) {
    if (options_.lane.make) open_lane();
    if (info().watch != nullptr && size() > 1)
      watched_ = info().watch->watch(group_id_, shared_recorder(),
                                     [this](const CommError::Details& error) { end_with(error); });
  }

  // Jobs refer to this object: they all run before its members go.
  ~TransportCommunicator() override {
    if (lane_ != nullptr) lane_->leave();
    executor_->finish();
  }

  std::string backend() const override {
    // A group of one has no link that would tell its kind, so this is the medium that was asked
    // for.
    const std::string host =
        size() == 1 && options_.media == Media::tcp ? "tcp" : transport_->kind();
    return lane_ == nullptr ? host : fmt::format("{}+{}", lane_->name(), host);
  }
  bool canonical_order() const override { return lane_ == nullptr; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override {
    if (lane_ != nullptr) return std::nullopt;
    return transport_->sent_bytes();
  }
  // Results on the device may come from a call that other ranks have made differently.
  void check_device_results() override {
    if (lane_ == nullptr) return;
    try {
      if (last_compared_ != nullptr) (void)executor_->wait(*last_compared_, Deadline::never());
    } catch (const CommError&) {
      // The lane has heard of this failure, and knows whether a waiter has been told.
    }
    lane_->check_results();
  }

 private:
  std::shared_ptr<PendingCall> do_start(Call call) override;
  std::shared_ptr<Communicator> do_split(const SplitRequest& request, Deadline deadline) override;
  void do_abort(const std::string& reason) override;
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void do_check(Operation operation, const at::Tensor& tensor) const override;

  int sum_of_faults(int mine);
  void open_lane();
  std::shared_ptr<PendingCall> start_on_lane(Call call);
  void compare(const Fingerprint& call, const std::vector<TransferSide>& sides, Deadline deadline);
  void look_at_ranks(const Fingerprint& call);
  void run_call(const Call& call, Staging* staging) override;
  void run_on_device(const Call& call, Staging& staging);
  void run_alone(const Call& call, Staging& staging);
  void run_on_host(const Call& call);
  void run_algorithm(const Call& call);
  Reduction reduction_of(const Call& call) const;
  void all_reduce_tensors(const Call& call, Algorithm algorithm);
  void run_exchange(const Call& call);
  void tell_all(const std::exception_ptr& error);
  void end_with(const CommError::Details& details);
  CommError complete(const CommError& error, const Fingerprint& call) const;

  std::shared_ptr<Endpoint> endpoint_;
  std::string group_id_;
  std::vector<EndpointAddress> addresses_;
  TransportOptions options_;
  std::unique_ptr<Transport> transport_;
  std::vector<std::byte> packed_;
  StagingStreams staging_streams_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<Errand> last_compared_;  // the comparison of the lane's last call
  // These refer to this object, so they are declared last and destroyed first.
  std::unique_ptr<DeviceLane> lane_;
  std::unique_ptr<WaitWatch::Watched> watched_;
};

int TransportCommunicator::sum_of_faults(int mine) {
  const at::Tensor sum = at::full({1}, mine, at::kInt);
  all_reduce(sum, ReduceOp::sum, {.launch = Launch::on_wait}).wait_on_host();
  return sum.item<std::int32_t>();
}

// Connects the lane on all ranks, or on none of them.
void TransportCommunicator::open_lane() {
  std::string fault;
  try {
    lane_ = options_.lane.make(
        {.info = info(),
         .recorder = shared_recorder(),
         .all_are_well = [this](bool well) { return sum_of_faults(well ? 0 : 1) == 0; },
         .broadcast =
             [this](const at::Tensor& bytes) {
               broadcast(bytes, 0, {.launch = Launch::on_wait}).wait_on_host();
             },
         .failed = [this](const CommError::Details& details) { end_with(details); },
         .look = [this](const Fingerprint& call) { look_at_ranks(call); },
         .timeout = std::min(options_.timeout, kLaneTimeout)});
  } catch (const std::exception& error) {
    fault = error.what();
  }
  if (sum_of_faults(fault.empty() ? 0 : 1) == 0) return set_lane(lane_->name());
  lane_.reset();
  if (fault.empty()) fault = "other ranks could not connect it: their own messages say why";
  const std::string& title = options_.lane.title;
  if (options_.lane.is_needed) throw UsageError("{} cannot be used: {}", title, fault);
  log::warn("{} cannot be used, so tensors on GPUs go through the host's memory: {}", title, fault);
  set_backend_reason(title + " could not be connected");
}

void TransportCommunicator::do_check(Operation operation, const at::Tensor& tensor) const {
  const auto type = tensor.device().type();
  if (type != c10::DeviceType::CPU && type != c10::DeviceType::CUDA && type != c10::DeviceType::MPS)
    throw UsageError("{}: the backend '{}' takes tensors on the CPU, CUDA or MPS, not on {}",
                     comm::name(operation), backend(), tensor.device().str());
  if (lane_ != nullptr && tensor.is_cuda()) lane_->check(operation, tensor);
}

std::shared_ptr<PendingCall> TransportCommunicator::do_start(Call call) {
  Fingerprint& fingerprint = call.fingerprint;
  if (fingerprint.algorithm == Algorithm::automatic &&
      has_algorithm(fingerprint.operation, options_.algorithm))
    fingerprint.algorithm = options_.algorithm;
  const at::Tensor& sample = !call.outputs.empty()     ? call.outputs.front()
                             : !call.transfers.empty() ? call.transfers.front().tensor
                                                       : at::Tensor();
  if (lane_ != nullptr && sample.defined() && sample.is_cuda())
    return start_on_lane(std::move(call));
  std::unique_ptr<Staging> staging;
  if (sample.defined() && !sample.device().is_cpu())
    staging = std::make_unique<Staging>(staging_streams_.on(sample.device()));
  const Launch launch = call.launch;
  auto pending = std::make_shared<TransportCall>(*this, executor_, shared_recorder(),
                                                 std::move(call), std::move(staging));
  executor_->submit(pending, launch);
  return pending;
}

// The ranks tell each other over the host which call they have made on the GPUs. So a mismatch, or
// a rank that does not come, is found and named as in any other call.
std::shared_ptr<PendingCall> TransportCommunicator::start_on_lane(Call call) {
  call.fingerprint.algorithm = Algorithm::nccl;
  last_compared_ = std::make_shared<Errand>(
      call.deadline, [this, fingerprint = call.fingerprint, sides = sides_of(call, rank()),
                      deadline = call.deadline] { compare(fingerprint, sides, deadline); });
  executor_->submit(last_compared_, Launch::in_background);
  return lane_->start(std::move(call));
}

void TransportCommunicator::compare(const Fingerprint& call, const std::vector<TransferSide>& sides,
                                    Deadline deadline) {
  try {
    transport_->begin(call, deadline);
    if (call.operation == Operation::exchange || !sides.empty()) {
      for (const TransferSide& side : sides)
        if (side.sends) transport_->post_send(side.peer, side.fingerprint, {});
      for (const TransferSide& side : sides)
        if (!side.sends) transport_->post_receive(side.peer, side.fingerprint, {});
      transport_->end();
    } else {
      comm::barrier(*transport_);
    }
    transport_->finish();
  } catch (const CommError& error) {
    transport_->abandon();
    throw complete(error, call);
  }
}

void TransportCommunicator::look_at_ranks(const Fingerprint& call) {
  // A call that runs looks at the ranks itself.
  if (!executor_->idle()) return;
  executor_->submit(std::make_shared<Errand>(Deadline::never(),
                                             [this, call] {
                                               try {
                                                 transport_->look(call);
                                               } catch (const CommError& error) {
                                                 throw complete(error, call);
                                               }
                                             }),
                    Launch::in_background);
}

CommError TransportCommunicator::complete(const CommError& error, const Fingerprint& call) const {
  auto details = error.details();
  if (const auto verdict = watched_ ? watched_->verdict() : std::nullopt) details = *verdict;
  if (details.operation.empty()) details.operation = comm::name(call.operation);
  if (details.sequence == 0) details.sequence = call.sequence;
  return info().error(std::move(details));
}

void TransportCommunicator::run_call(const Call& call, Staging* staging) {
  recorder().mark(call.flight_entry, flight::State::started);
  try {
    transport_->begin(call.fingerprint, call.deadline);
    if (staging != nullptr) {
      run_on_device(call, *staging);
    } else {
      run_on_host(call);
    }
  } catch (const CommError& error) {
    recorder().mark(call.flight_entry, flight::State::failed);
    throw complete(error, call.fingerprint);
  } catch (...) {
    recorder().mark(call.flight_entry, flight::State::failed);
    throw;
  }
  recorder().mark(call.flight_entry, flight::State::finished);
}

// A group of one sends nothing: each output is a copy of its input.
void TransportCommunicator::run_alone(const Call& call, Staging& staging) {
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    const at::Tensor& input = call.inputs[i];
    if (input.data_ptr() != call.outputs[i].data_ptr())
      staging.to_device(input, call.outputs[i].view(input.sizes()));
  }
  transport_->finish();
  staging.finish();
}

// Runs the call on host copies of its tensors.
void TransportCommunicator::run_on_device(const Call& call, Staging& staging) {
  if (size() == 1 && call.transfers.empty()) return run_alone(call, staging);
  Call host;
  host.fingerprint = call.fingerprint;
  host.transfer_sequences = call.transfer_sequences;
  for (const at::Tensor& input : call.inputs) host.inputs.push_back(staging.to_host(input));
  const bool in_place = call.fingerprint.operation == Operation::all_reduce ||
                        call.fingerprint.operation == Operation::broadcast;
  for (const at::Tensor& output : call.outputs)
    host.outputs.push_back(in_place ? staging.to_host(output) : staging.host_like(output));
  for (const Transfer& transfer : call.transfers) {
    const bool sends = transfer.direction == Transfer::Direction::send;
    host.transfers.push_back(
        {transfer.direction, transfer.peer,
         sends ? staging.to_host(transfer.tensor) : staging.host_like(transfer.tensor)});
  }
  run_on_host(host);
  for (std::size_t i = 0; i < call.outputs.size(); ++i)
    staging.to_device(host.outputs[i], call.outputs[i]);
  for (std::size_t i = 0; i < call.transfers.size(); ++i)
    if (call.transfers[i].direction == Transfer::Direction::receive)
      staging.to_device(host.transfers[i].tensor, call.transfers[i].tensor);
  staging.finish();
}

void TransportCommunicator::run_on_host(const Call& call) {
  try {
    run_algorithm(call);
  } catch (...) {
    transport_->abandon();
    throw;
  }
  transport_->finish();
}

Reduction TransportCommunicator::reduction_of(const Call& call) const {
  return {.dtype = call.fingerprint.dtype,
          .op = call.fingerprint.reduce_op,
          .divisor = divisor_of(call, size())};
}

void TransportCommunicator::run_algorithm(const Call& call) {
  const Fingerprint& fingerprint = call.fingerprint;
  const Reduction reduction = reduction_of(call);
  const Algorithm algorithm =
      choose_algorithm(fingerprint.operation, fingerprint.algorithm,
                       fingerprint.count * size_of(fingerprint.dtype), transport_->topology());
  switch (fingerprint.operation) {
    case Operation::all_reduce: return all_reduce_tensors(call, algorithm);
    case Operation::all_gather:
      return comm::all_gather(*transport_, algorithm, parts_of(call.outputs, size()),
                              bytes_of(call.inputs.front()));
    case Operation::reduce_scatter: {
      const auto parts = parts_of(call.inputs, size());
      const std::vector<ConstBytes> inputs(parts.begin(), parts.end());
      return comm::reduce_scatter(*transport_, algorithm, reduction, bytes_of(call.outputs.front()),
                                  inputs);
    }
    case Operation::all_to_all: {
      const auto parts = parts_of(call.inputs, size());
      const std::vector<ConstBytes> inputs(parts.begin(), parts.end());
      return comm::all_to_all(*transport_, parts_of(call.outputs, size()), inputs);
    }
    case Operation::broadcast:
      for (const at::Tensor& tensor : call.outputs)
        comm::broadcast(*transport_, algorithm, bytes_of(tensor), fingerprint.root);
      return;
    case Operation::exchange: return run_exchange(call);
    case Operation::barrier: return comm::barrier(*transport_);
    case Operation::split: break;  // an all_gather does its work
  }
  LOCKSTEP_CHECK(false, "a call of {}", comm::name(fingerprint.operation));
}

// Small tensors of a list are packed: one message is cheaper than many, and the bits are the same.
void TransportCommunicator::all_reduce_tensors(const Call& call, Algorithm algorithm) {
  const Reduction reduction = reduction_of(call);
  if (call.outputs.size() == 1)
    return comm::all_reduce(*transport_, algorithm, reduction, bytes_of(call.outputs.front()));
  std::vector<Bytes> small;
  std::size_t small_bytes = 0;
  const auto flush = [&] {
    if (small.empty()) return;
    if (small.size() == 1) {
      comm::all_reduce(*transport_, algorithm, reduction, small.front());
    } else {
      packed_.resize(std::max(packed_.size(), small_bytes));
      std::size_t at = 0;
      for (const Bytes& bytes : small) {
        if (!bytes.empty()) std::memcpy(packed_.data() + at, bytes.data(), bytes.size());
        at += bytes.size();
      }
      comm::all_reduce(*transport_, algorithm, reduction, {packed_.data(), small_bytes});
      at = 0;
      for (const Bytes& bytes : small) {
        if (!bytes.empty()) std::memcpy(bytes.data(), packed_.data() + at, bytes.size());
        at += bytes.size();
      }
    }
    small.clear();
    small_bytes = 0;
  };
  for (const at::Tensor& tensor : call.outputs) {
    const Bytes bytes = bytes_of(tensor);
    if (small_bytes + bytes.size() > kPackBytes) flush();
    small.push_back(bytes);
    small_bytes += bytes.size();
  }
  flush();
}

void TransportCommunicator::run_exchange(const Call& call) {
  const std::vector<TransferSide> sides = sides_of(call, rank());
  for (std::size_t i = 0; i < sides.size(); ++i)
    if (sides[i].sends)
      transport_->post_send(sides[i].peer, sides[i].fingerprint,
                            bytes_of(call.transfers[i].tensor));
  for (std::size_t i = 0; i < sides.size(); ++i)
    if (!sides[i].sends)
      transport_->post_receive(sides[i].peer, sides[i].fingerprint,
                               bytes_of(call.transfers[i].tensor));
  transport_->end();
}

// Runs in the thread of the failing call, before any waiter hears of the failure.
void TransportCommunicator::tell_all(const std::exception_ptr& error) {
  Notice notice;
  notice.found_by = rank();
  notice.operation = "communication";
  try {
    std::rethrow_exception(error);
  } catch (const CommError& comm_error) {
    notice = Notice::from(comm_error, rank());
  } catch (const std::exception& other) {
    notice.ranks = {rank()};
    notice.explanation = other.what();
  } catch (...) {
    notice.ranks = {rank()};
    notice.explanation = "Something was thrown that is no std::exception.";
  }
  transport_->tell(notice);
  const CommError told = info().error(notice.error(name(), rank()).details());
  journal().group_failed(
      recorder(),
      {.reason = told.what(), .fault = fault_name(told.fault()), .at_fault = told.global_ranks()},
      notice.found_by == rank() ? flight::Journal::FoundBy::this_rank
                                : flight::Journal::FoundBy::another);
  if (lane_ != nullptr) lane_->end(told.details());
}

void TransportCommunicator::do_abort(const std::string& reason) {
  end_with(
      {.fault = Fault::aborted, .operation = "abort", .ranks = {rank()}, .explanation = reason});
}

void TransportCommunicator::end_with(const CommError::Details& details) {
  const Notice notice = Notice::from(CommError(details), rank());
  const auto error = std::make_exception_ptr(info().error(notice.error(name(), rank()).details()));
  transport_->interrupt(notice);
  executor_->fail(error, [&] { tell_all(error); });
}

std::shared_ptr<Communicator> TransportCommunicator::do_split(const SplitRequest& request,
                                                              Deadline deadline) {
  constexpr int kNumbers = 3;
  at::Tensor mine = at::empty({kNumbers}, at::kLong);
  mine[0] = request.color;
  mine[1] = request.key;
  mine[2] = static_cast<int>(request.tensors);
  at::Tensor all = at::empty({size(), kNumbers}, at::kLong);
  all_gather(
      all, mine,
      {.timeout = std::chrono::ceil<milliseconds>(deadline.remaining()), .launch = Launch::on_wait})
      .wait_on_host();
  const auto* rows = static_cast<const std::int64_t*>(all.data_ptr());
  std::vector<int> members;
  for (int other = 0; other < size(); ++other) {
    if (rows[kNumbers * other] == request.color) members.push_back(other);
    if (rows[kNumbers * other + 2] != rows[2])
      throw UsageError("split: rank {} of '{}' says otherwise than rank 0 where the tensors of the "
                       "new group '{}' will be (GroupTensors): give all ranks the same",
                       other, name(), request.name);
  }
  std::stable_sort(members.begin(), members.end(), [rows](int a, int b) {
    return rows[kNumbers * a + 1] < rows[kNumbers * b + 1];
  });
  // The lane is split here, where all ranks are: some of them take no part in connecting the new
  // groups below.
  MakeLane make_lane;
  if (lane_ != nullptr && request.tensors == GroupTensors::on_any_device)
    make_lane = lane_->split(request, static_cast<int>(members.size()), deadline);
  if (request.color < 0) return nullptr;
  GroupInfo group{.name = request.name,
                  .generation = generation(),
                  .journal = info().journal,
                  .watch = info().watch};
  group.global_ranks.clear();
  std::vector<EndpointAddress> addresses;
  for (const int member : members) {
    if (member == rank()) group.rank = static_cast<int>(addresses.size());
    addresses.push_back(addresses_[static_cast<std::size_t>(member)]);
    group.global_ranks.push_back(global_ranks()[static_cast<std::size_t>(member)]);
  }
  TransportOptions options = options_;
  options.timeout = timeout();
  options.lane.make = std::move(make_lane);
  options.lane.is_needed = true;
  return make_transport_communicator(
      endpoint_, group,
      group_id_from(fmt::format("{}/{}.{}", group_id_, request.number, request.color)),
      std::move(addresses), options);
}

at::Tensor TransportCommunicator::do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::int64_t count = 1;
  for (const std::int64_t extent : sizes) count *= extent;
  auto memory =
      transport_->heap().allocate(static_cast<std::size_t>(count) * c10::elementSize(dtype));
  void* data = memory.get();
  return at::from_blob(
      data, sizes, [memory](void*) {}, at::TensorOptions().dtype(dtype));
}

}  // namespace

std::shared_ptr<Communicator> make_transport_communicator(std::shared_ptr<Endpoint> endpoint,
                                                          const GroupInfo& group,
                                                          const std::string& group_id,
                                                          std::vector<EndpointAddress> addresses,
                                                          const TransportOptions& options) {
  try {
    return std::make_shared<TransportCommunicator>(std::move(endpoint), group, group_id,
                                                   std::move(addresses), options);
  } catch (const CommError& error) {
    throw group.error(error.details());
  }
}

}  // namespace lockstep::comm::backends

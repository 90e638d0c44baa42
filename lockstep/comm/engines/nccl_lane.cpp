// NCCL, called directly, as the lane of a group's tensors on GPUs.
//
// Calls run on a stream of the lane's own, in their order, exchanges included: ranks must not rely
// on an exchange overtaking a collective. wait() orders the current stream and never blocks the
// host.
//
// What NCCL cannot promise (docs/engines.md has the whole list):
//   - Sums come in NCCL's order: within rounding of the canonical one. 16-bit all-reduces travel as
//     float32, because NCCL would round after each hop.
//   - Calls are compared beside them: kernels of a mismatched call may have run, on wrong data,
//     before it is found.
//   - The parts of an uneven all_to_all are not compared; where they do not fit, the call ends at
//     its deadline.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <lockstep/base/host_identity.h>
#include <lockstep/comm/engines/engines.h>
#include <lockstep/comm/engines/nccl_collectives.h>
#include <lockstep/comm/engines/nccl_library.h>
#include <lockstep/device/cuda.h>
#include <lockstep/flight/journal.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::comm::engines {

namespace {

// How often the lane looks what has ended on the device, and what NCCL reports.
constexpr milliseconds kPollEvery(10);
// How often it looks at the other ranks while a call takes its time, and when that begins.
constexpr milliseconds kLookEvery(50);
constexpr milliseconds kTakesItsTime(100);
// How much later than its deadline a call ends that all ranks have made. Where one has not, its
// group knows better what to say, and says it at the deadline.
constexpr milliseconds kAfterDeadline(2000);

// What a call leaves behind where it ends.
struct CallLog {
  std::shared_ptr<flight::Recorder> recorder;
  std::shared_ptr<flight::Journal> journal;

  void mark(const Call& call, flight::State state) const {
    if (call.flight_entry != 0) recorder->mark(call.flight_entry, state);
  }
};

// A call on the device: over when its event is, or failed by its lane. Thread-safe; may outlive the
// lane.
class DeviceCall final : public PendingCall {
 public:
  DeviceCall(Call call, CallLog log, c10::Device device)
      : call_(std::move(call)), log_(std::move(log)), device_(device) {}

  const Call& call() const { return call_; }

  // What has been enqueued on the stream so far is the call.
  void enqueued(const c10::cuda::CUDAStream& stream) { finished_.record(stream); }

  // Streams wait for each other.
  bool ready() const override { return true; }

  bool done() const override {
    const std::lock_guard lock(mutex_);
    if (done_) return true;
    try {
      if (!finished_.query()) return false;
      log_.mark(call_, flight::State::finished);
      over();
    } catch (const std::exception& error) {  // of CUDA: nothing more comes of this device
      fail_locked({.fault = Fault::engine,
                   .operation = comm::name(call_.fingerprint.operation),
                   .sequence = call_.fingerprint.sequence,
                   .explanation = fmt::format("{} reports: {}", device_.str(), error.what())});
    }
    return true;
  }

  // The stream waits, so the tensors need not be held for the lane's any longer.
  void wait() override {
    const std::lock_guard lock(mutex_);
    if (fault_) throw CommError(*fault_);
    if (done_) return;
    finished_.block(c10::cuda::getCurrentCUDAStream(device_.index()));
    let_go();
  }

  void wait_on_host(Deadline deadline) override {
    if (!done()) {
      std::optional<flight::Recorder::Block> block;
      // Who stops waiting before the call must end is not blocked: it may do something else then.
      if (call_.flight_entry != 0 && deadline.at() >= call_.deadline.at())
        block.emplace(*log_.recorder, call_.flight_entry);
      const auto begin = Clock::now();
      // Its lane ends it where it does not end by itself.
      for (int polls = 0; !done() && !deadline.passed(); ++polls) {
        if (polls < 1000)
          std::this_thread::yield();
        else
          std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      log_.journal->add_waited(std::chrono::nanoseconds(Clock::now() - begin).count());
    }
    if (const auto its = fault()) throw CommError(*its);
    if (!done())
      throw CommError({.fault = Fault::timeout,
                       .operation = name(call_.fingerprint.operation),
                       .group = log_.recorder->group(),
                       .sequence = call_.fingerprint.sequence,
                       .explanation = fmt::format("It was not done when the waiter's {:.1f} s "
                                                  "were over; it goes on.",
                                                  deadline.span_seconds())});
  }

  std::optional<CommError::Details> fault() const {
    const std::lock_guard lock(mutex_);
    return fault_;
  }

  void fail(const CommError::Details& fault) {
    const std::lock_guard lock(mutex_);
    if (!done_) fail_locked(fault);
  }

 private:
  void fail_locked(const CommError::Details& fault) const {
    log_.mark(call_, flight::State::failed);
    fault_ = fault;
    over();
  }
  void over() const {
    done_ = true;
    let_go();
  }
  void let_go() const {
    call_.inputs.clear();
    call_.outputs.clear();
    call_.transfers.clear();
  }

  mutable Call call_;  // its tensors go when they are no longer needed
  const CallLog log_;
  const c10::Device device_;
  mutable std::mutex mutex_;
  mutable at::cuda::CUDAEvent finished_;
  mutable bool done_ = false;
  mutable std::optional<CommError::Details> fault_;
};

using Connect = std::function<std::shared_ptr<NcclComm>(const LaneGroup& group, Deadline deadline)>;

void check_gpu() {
  if (c10::cuda::device_count() == 0)
    throw UsageError("the backend 'nccl' needs a GPU, and this process sees none: use the backend "
                     "shm or tcp, or check nvidia-smi and CUDA_VISIBLE_DEVICES");
}

// Connects ranks that have no communicator in common: the first tells them where to meet. Every
// rank takes part in that, whatever is the matter with it.
std::shared_ptr<NcclComm> connect_anew(const LaneGroup& group, Deadline deadline) {
  ncclUniqueId id;
  const auto size = static_cast<std::int64_t>(sizeof(id.internal));
  const at::Tensor bytes = at::zeros({size + 1}, at::kByte);  // the last says whether they count
  std::exception_ptr fault;
  try {
    check_gpu();
    const NcclLibrary& nccl = NcclLibrary::get();
    if (group.info.rank == 0) {
      nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
      std::memcpy(bytes.data_ptr(), id.internal, sizeof(id.internal));
      bytes[size] = 1;
    }
  } catch (...) {
    fault = std::current_exception();
  }
  group.broadcast(bytes);
  if (fault) std::rethrow_exception(fault);
  if (bytes[size].item<int>() != 1)
    throw NcclError("the group's first rank could not begin: its own message says why");
  std::memcpy(id.internal, bytes.data_ptr(), sizeof(id.internal));
  return NcclComm::connect(id, group.info.rank, static_cast<int>(group.info.global_ranks.size()),
                           deadline);
}

class NcclLane final : public DeviceLane {
 public:
  NcclLane(LaneGroup group, c10::Device device, const Connect& connect)
      : group_(std::move(group)),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        comm_(connected(connect)),
        watcher_([this] { watch(); }) {}

  ~NcclLane() override {
    stop();
    if (failed())
      comm_->abort();
    else
      comm_->close();
  }

  std::string name() const override { return "nccl"; }

  void check(Operation operation, const at::Tensor& tensor) const override {
    if (tensor.device() == device_) return;
    throw UsageError("{}: the tensor is on {}, but this rank's GPU is {}: move it with .to(\"{}\")",
                     comm::name(operation), tensor.device().str(), device_.str(), device_.str());
  }

  std::shared_ptr<PendingCall> start(Call call) override {
    const c10::cuda::CUDAGuard on_device(device_);
    poll();
    throw_failure();
    const auto pending = std::make_shared<DeviceCall>(
        std::move(call), CallLog{group_.recorder, group_.info.journal}, device_);
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    const c10::cuda::CUDAStreamGuard guard(stream_);
    ready.block(stream_);
    if (pending->call().flight_entry != 0)
      group_.recorder->mark(pending->call().flight_entry, flight::State::started);
    try {
      enqueue_collective(*comm_, pending->call(), size(), stream_);
      pending->enqueued(stream_);
    } catch (const NcclError& error) {
      group_.failed(engine_fault(pending->call(), error.what()));
      throw_failure();
    } catch (const c10::Error& error) {
      group_.failed(engine_fault(pending->call(), error.what()));
      throw_failure();
    }
    track(pending);
    return pending;
  }

  MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) override {
    throw_failure();
    const c10::cuda::CUDAGuard on_device(device_);
    // NCCL wants nothing under way in the communicator that it splits.
    for (const auto& call : outstanding()) call->wait_on_host(deadline);
    const bool takes_part = request.color >= 0 && group_size > 1;
    std::shared_ptr<NcclComm> made;
    try {
      made = NcclComm::split(comm_, takes_part ? request.color : -1, request.key, deadline);
    } catch (const NcclError& error) {
      Call call;
      call.fingerprint = {.sequence = request.number, .operation = Operation::split};
      group_.failed(engine_fault(call, error.what()));
      throw_failure();
    }
    if (!takes_part) return nullptr;
    return [device = device_, made](LaneGroup group) {
      return std::make_unique<NcclLane>(std::move(group), device,
                                        [made](const auto&...) { return made; });
    };
  }

  void end(const CommError::Details& fault) override {
    std::deque<std::shared_ptr<DeviceCall>> calls;
    {
      const std::lock_guard lock(mutex_);
      if (fault_) return;
      fault_ = fault;
      calls.swap(outstanding_);
    }
    // Before what is on the device ends, with whatever numbers.
    for (const auto& call : calls) call->fail(fault);
    comm_->abort();
  }

  void leave() override {
    // The others must not wait for what this rank will not send.
    if (std::uncaught_exceptions() > 0 && !failed())
      group_.failed({.fault = Fault::aborted,
                     .operation = "a call",
                     .ranks = {group_.info.rank},
                     .explanation = fmt::format("rank {} has left the group because of an error of "
                                                "its own",
                                                group_.info.rank)});
    try {
      // Work on the device that nobody waits for on the host is nothing unusual: it may end.
      for (const auto& call : outstanding()) call->wait_on_host(Deadline::never());
    } catch (const CommError&) {
      // The group has failed.
    }
    stop();
  }

 private:
  int size() const { return static_cast<int>(group_.info.global_ranks.size()); }

  std::shared_ptr<NcclComm> connected(const Connect& connect) {
    const c10::cuda::CUDAGuard on_device(device_);
    try {
      return connect(group_, Deadline::after(group_.timeout));
    } catch (const NcclError& error) {
      throw CommError(
          {.fault = Fault::engine,
           .operation = "connecting nccl",
           .group = group_.info.name,
           .explanation = fmt::format("NCCL {} on {} reports: {}", NcclLibrary::get().version(),
                                      device_.str(), error.what())});
    }
  }

  CommError::Details engine_fault(const Call& call, const std::string& text) const {
    return {.fault = Fault::engine,
            .operation = comm::name(call.fingerprint.operation),
            .group = group_.info.name,
            .sequence = call.fingerprint.sequence,
            .explanation = fmt::format("NCCL reports on {}: {}", device_.str(), text)};
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return fault_.has_value();
  }
  void throw_failure() const {
    const std::lock_guard lock(mutex_);
    if (fault_) throw CommError(*fault_);
  }

  void track(const std::shared_ptr<DeviceCall>& call) {
    const std::lock_guard lock(mutex_);
    if (fault_)
      call->fail(*fault_);
    else
      outstanding_.push_back(call);
    changed_.notify_all();
  }

  std::deque<std::shared_ptr<DeviceCall>> outstanding() const {
    const std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // Lets go of what has ended on the device, in the order of its stream. The oldest call that has
  // not, or null.
  std::shared_ptr<DeviceCall> poll() {
    while (true) {
      std::shared_ptr<DeviceCall> oldest;
      {
        const std::lock_guard lock(mutex_);
        if (outstanding_.empty()) return nullptr;
        oldest = outstanding_.front();
      }
      if (!oldest->done()) return oldest;
      if (const auto fault = oldest->fault(); fault && !failed()) group_.failed(*fault);
      const std::lock_guard lock(mutex_);
      if (!outstanding_.empty() && outstanding_.front() == oldest) outstanding_.pop_front();
    }
  }

  // In a thread of its own: what nobody may be waiting for on the host.
  void watch() {
    // A thread without a device of its own would make a context on the first GPU.
    c10::cuda::set_device(device_.index());
    std::shared_ptr<DeviceCall> watched;
    Clock::time_point since, looked;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (outstanding_.empty())
        changed_.wait(lock, [this] { return stopping_ || !outstanding_.empty(); });
      else
        changed_.wait_for(lock, kPollEvery, [this] { return stopping_; });
      lock.unlock();
      const auto oldest = poll();
      const auto now = Clock::now();
      if (oldest != watched) since = now;
      watched = oldest;
      if (oldest != nullptr) check_problem(*oldest, now);
      if (oldest != nullptr && now - since >= kTakesItsTime && now - looked >= kLookEvery) {
        looked = now;
        group_.look(oldest->call().fingerprint);
      }
      lock.lock();
    }
  }

  void check_problem(const DeviceCall& oldest, Clock::time_point now) {
    const Call& call = oldest.call();
    if (const std::string problem = comm_->problem(); !problem.empty())
      return group_.failed(engine_fault(call, problem));
    if (call.deadline.at() > now - kAfterDeadline) return;
    group_.failed(
        {.fault = Fault::timeout,
         .operation = comm::name(call.fingerprint.operation),
         .group = group_.info.name,
         .sequence = call.fingerprint.sequence,
         .explanation = fmt::format(
             "All ranks have made the call, and it was not over on {} of rank {} after {:.1f} s: "
             "this GPU or one it is connected with is busy with something else, or does not get "
             "through to another (NCCL_DEBUG=INFO says how NCCL connects them)",
             device_.str(), group_.info.rank, call.deadline.span_seconds())});
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
  }

  const LaneGroup group_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<NcclComm> comm_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<CommError::Details> fault_;
  std::deque<std::shared_ptr<DeviceCall>> outstanding_;
  std::thread watcher_;
};

}  // namespace

void try_nccl(const Deadline& deadline) {
  check_gpu();
  const NcclLibrary& nccl = NcclLibrary::get();
  ncclUniqueId id;
  nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
  const auto comm = NcclComm::connect(id, 0, 1, deadline);
  const at::Tensor tensor = at::ones({2}, at::device(at::kCUDA));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  nccl.check(nccl.all_reduce(tensor.data_ptr(), tensor.data_ptr(), 2, ncclFloat32, ncclSum,
                             NcclComm::Use(*comm).get(), stream),
             "ncclAllReduce");
  if (tensor.sum().item<double>() != 2) throw NcclError("a sum of one rank is wrong");
  comm->close();
}

MakeLane nccl_lanes(c10::Device device) {
  return [device](LaneGroup group) -> std::unique_ptr<DeviceLane> {
    return std::make_unique<NcclLane>(std::move(group), device, connect_anew);
  };
}

std::string gpu_identity(c10::Device device) {
  if (!device.is_cuda() || c10::cuda::device_count() == 0) return "";
  try {
    NcclLibrary::get();
  } catch (const UsageError&) {
    return "";
  }
  return fmt::format("{}/{}", host_identity(), device::gpu_bus_id(device.index()));
}

}  // namespace lockstep::comm::engines

#include <lockstep/comm/backends/nccl/nccl_lane.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/backends/nccl/nccl_library.h>
#include <lockstep/device/backward_thread.h>
#include <lockstep/device/cuda.h>
#include <lockstep/flight/journal.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::comm::backends {

namespace {

// How often the lane checks which calls have ended on the device, and what NCCL reports.
constexpr milliseconds kPollEvery(10);
// How often the lane has the other ranks looked at while a call takes long, and when that begins.
constexpr milliseconds kLookEvery(50);
constexpr milliseconds kTakesItsTime(100);
// A call that all ranks have made is ended this long after its deadline. If a rank has not made it,
// the group finds that out at the deadline and has the better message.
constexpr milliseconds kAfterDeadline(2000);

// How long a lane waits for a look at the other ranks when NCCL itself reports an error: NCCL names
// no ranks.
constexpr milliseconds kLookFirst(300);
// How long the destructor waits for an abort.
constexpr milliseconds kAborting(5000);

// Records how a lane's calls end.
struct CallLog {
  std::shared_ptr<flight::Recorder> recorder;
  std::shared_ptr<flight::Journal> journal;
  std::shared_ptr<std::atomic<bool>> failure_was_thrown;

  void mark(const Call& call, flight::State state) const {
    if (call.flight_entry != 0) recorder->mark(call.flight_entry, state);
  }
  [[noreturn]] void raise(const CommError::Details& fault) const {
    *failure_was_thrown = true;
    throw CommError(fault);
  }
};

// A call on the device. It is over when its event is, or when its lane fails it. Thread-safe; may
// outlive the lane.
class DeviceCall final : public PendingCall {
 public:
  // The call runs after the work that the stream has been given so far.
  DeviceCall(Call call, CallLog log, const c10::cuda::CUDAStream& stream)
      : call_(std::move(call)), log_(std::move(log)), made_on_(stream) {
    ready_.record(stream);
  }

  // Only the thread that enqueues the call may use its tensors.
  const Call& call() const { return call_; }

  // Called by one thread.
  void enqueue(NcclComm& comm, int num_ranks, const c10::cuda::CUDAStream& stream) {
    {
      const std::lock_guard lock(mutex_);
      if (released_) return;
      enqueuing_ = true;
    }
    try {
      ready_.block(stream);
      log_.mark(call_, flight::State::started);
      enqueue_collective(comm, call_, num_ranks, stream);
      finished_.record(stream);
    } catch (...) {
      end_enqueuing(/*enqueued=*/false);
      throw;
    }
    end_enqueuing(/*enqueued=*/true);
  }

  // Streams can wait for each other as soon as the call is on one.
  bool ready() const override {
    const std::lock_guard lock(mutex_);
    return enqueued_ || done_;
  }

  bool done() const override {
    const std::lock_guard lock(mutex_);
    if (done_) return true;
    if (!enqueued_) return false;
    try {
      if (!finished_.query()) return false;
      log_.mark(call_, flight::State::finished);
      done_ = true;
      in_flight_.reset();
      let_go();
    } catch (const std::exception& error) {
      // An error of CUDA: the device will give no more results.
      fail_locked(
          {.fault = Fault::engine,
           .operation = comm::name(call_.fingerprint.operation),
           .sequence = call_.fingerprint.sequence,
           .explanation = fmt::format("{} reports: {}", made_on_.device().str(), error.what())});
    }
    return true;
  }

  void wait() override {
    wait_until_enqueued();
    const auto current = c10::cuda::getCurrentCUDAStream(made_on_.device_index());
    finished_.block(current);
    // Memory that is allocated on this stream from now on is used after the call.
    const std::lock_guard lock(mutex_);
    if (current == made_on_ && !fault_) let_go();
  }

  void wait_on_host(Deadline deadline) override {
    if (!done()) {
      const Wait wait(*this, deadline);
      // If the call does not end by itself, its lane ends it.
      for (int polls = 0; !done() && !deadline.passed(); ++polls) {
        if (polls < 1000)
          std::this_thread::yield();
        else
          std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    if (const auto its = fault()) log_.raise(*its);
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

  // The device may go on using the tensors until the lane has been aborted; then call release().
  void fail(const CommError::Details& fault) {
    {
      const std::lock_guard lock(mutex_);
      if (!done_) fail_locked(fault);
    }
    changed_.notify_all();
  }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    in_flight_.reset();
    if (!enqueuing_) let_go();
  }

 private:
  // While it lives, tells two readers that this thread waits: the search for ranks that wait for
  // each other, and the count of how long ranks wait.
  class Wait {
   public:
    Wait(DeviceCall& call, const Deadline& deadline) : call_(call), begin_(Clock::now()) {
      // A thread whose own deadline comes before the call's is not blocked by this call: it may do
      // something else then.
      if (call.call_.flight_entry == 0 || deadline.at() < call.call_.deadline.at()) return;
      const device::AsBackwardThread caller;
      block_.emplace(*call.log_.recorder, call.call_.flight_entry);
    }
    ~Wait() {
      call_.log_.journal->add_waited(std::chrono::nanoseconds(Clock::now() - begin_).count());
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    DeviceCall& call_;
    const Clock::time_point begin_;
    std::optional<flight::Recorder::Block> block_;
  };

  void end_enqueuing(bool enqueued) {
    {
      const std::lock_guard lock(mutex_);
      enqueuing_ = false;
      enqueued_ = enqueued;
      if (released_) let_go();
    }
    changed_.notify_all();
  }

  void wait_until_enqueued() {
    std::unique_lock lock(mutex_);
    if (!enqueued_ && !done_) {
      lock.unlock();
      const Wait wait(*this, Deadline::never());
      lock.lock();
      changed_.wait(lock, [this] { return enqueued_ || done_; });
    }
    if (fault_) log_.raise(*fault_);
  }

  void fail_locked(const CommError::Details& fault) const {
    log_.mark(call_, flight::State::failed);
    fault_ = fault;
    done_ = true;
  }
  void let_go() const {
    call_.inputs.clear();
    call_.outputs.clear();
    call_.transfers.clear();
  }

  mutable Call call_;  // releases its tensors when they are no longer needed
  mutable std::optional<NcclCallInFlight> in_flight_{std::in_place};
  const CallLog log_;
  const c10::cuda::CUDAStream made_on_;
  at::cuda::CUDAEvent ready_;
  mutable at::cuda::CUDAEvent finished_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool enqueuing_ = false;  // a thread uses the tensors
  bool enqueued_ = false;
  bool released_ = false;  // the tensors are not needed any more
  mutable bool done_ = false;
  mutable std::optional<CommError::Details> fault_;
};

void check_gpu() {
  if (c10::cuda::device_count() == 0)
    throw UsageError("the backend 'nccl' needs a GPU, and this process sees none: use the backend "
                     "shm or tcp, or check nvidia-smi and CUDA_VISIBLE_DEVICES");
}

// The connections between two ranks that a communicator has made. NCCL makes a connection in the
// first call that needs it, and waits there for the other rank to make it, too.
class Connections {
 public:
  explicit Connections(int num_ranks)
      : num_ranks_(num_ranks),
        collectives_wait_(environment_variable("NCCL_RUNTIME_CONNECT").value_or("0") != "0") {}

  // Whether NCCL may have to wait for other ranks when the call is enqueued. Called once for each
  // call.
  bool may_wait(const Call& call) {
    switch (call.fingerprint.operation) {
      case Operation::exchange: {
        bool all = true;
        for (const Transfer& transfer : call.transfers)
          all &= !made_.insert({transfer.peer, transfer.direction}).second;
        return !all;
      }
      case Operation::all_to_all:
      case Operation::reduce_scatter: {  // 16-bit sums are an all_to_all
        bool all = true;
        for (int peer = 0; peer < num_ranks_; ++peer)
          for (const auto direction : {Transfer::Direction::send, Transfer::Direction::receive})
            all &= !made_.insert({peer, direction}).second;
        return !all || collectives_wait_;
      }
      default: return collectives_wait_;
    }
  }

 private:
  const int num_ranks_;
  const bool collectives_wait_;
  std::set<std::pair<int, Transfer::Direction>> made_;
};

// Puts calls on a lane's stream, in their order: in the caller's thread, or in a thread of its own
// if NCCL may wait for other ranks in one of them.
//
// Threading: one thread at a time submits or stops; any thread may clear(). If NCCL waits for ever,
// the thread is left behind with everything that it needs.
class NcclEnqueuer : public std::enable_shared_from_this<NcclEnqueuer> {
 public:
  // Returns the fault for a call that NCCL refused, and ends the group.
  using Failed = std::function<CommError::Details(const Call& call, const std::string& text)>;

  NcclEnqueuer(std::shared_ptr<NcclComm> comm, int num_ranks, const c10::cuda::CUDAStream& stream,
               Failed failed)
      : comm_(std::move(comm)),
        num_ranks_(num_ranks),
        stream_(stream),
        failed_(std::move(failed)),
        connections_(num_ranks) {}

  void submit(const std::shared_ptr<DeviceCall>& call) {
    const bool may_wait = connections_.may_wait(call->call());
    {
      const std::lock_guard lock(mutex_);
      if (may_wait || !queue_.empty() || state_ != State::idle) {
        queue_.push_back(call);
        if (!thread_.joinable())
          thread_ = std::thread([self = shared_from_this()] { self->run(); });
        changed_.notify_all();
        return;
      }
    }
    if (const auto text = enqueue(*call)) call->fail(failed_(call->call(), *text));
  }

  // Drops the calls that have not been enqueued.
  void clear() {
    const std::lock_guard lock(mutex_);
    queue_.clear();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    if (!thread_.joinable()) return;
    if (state_ == State::in_nccl) return thread_.detach();
    lock.unlock();
    thread_.join();
  }

 private:
  enum class State : std::uint8_t { idle, in_nccl, telling };

  // Returns NCCL's error, or nothing if the call is on the stream.
  std::optional<std::string> enqueue(DeviceCall& call) {
    try {
      const c10::NoGradGuard no_grad;
      const c10::cuda::CUDAStreamGuard guard(stream_);
      call.enqueue(*comm_, num_ranks_, stream_);
      return std::nullopt;
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      state_ = State::idle;
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      const std::shared_ptr<DeviceCall> call = queue_.front();
      queue_.pop_front();
      state_ = State::in_nccl;
      lock.unlock();
      const auto text = enqueue(*call);
      lock.lock();
      if (stopping_) return;  // and the group may be gone by now
      if (!text) continue;
      state_ = State::telling;
      lock.unlock();
      call->fail(failed_(call->call(), *text));
      lock.lock();
    }
  }

  const std::shared_ptr<NcclComm> comm_;
  const int num_ranks_;
  const c10::cuda::CUDAStream stream_;
  const Failed failed_;
  Connections connections_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<DeviceCall>> queue_;
  State state_ = State::idle;  // what the thread is doing
  bool stopping_ = false;
  std::thread thread_;
};

class NcclLane final : public DeviceLane {
 public:
  NcclLane(LaneGroup group, c10::Device device, std::shared_ptr<NcclComm> comm)
      : group_(std::move(group)),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        comm_(std::move(comm)),
        enqueuer_(std::make_shared<NcclEnqueuer>(comm_, size(), stream_,
                                                 [this](const Call& call, const std::string& text) {
                                                   const CommError::Details fault =
                                                       engine_fault(call.fingerprint, text);
                                                   group_.failed(fault);
                                                   return fault;
                                                 })),
        log_{group_.recorder, group_.info.journal, std::make_shared<std::atomic<bool>>(false)},
        watcher_([this] { watch(); }) {}

  ~NcclLane() override {
    stop();
    if (!failed()) comm_->close();
    if (aborted_.valid()) (void)aborted_.wait_for(kAborting);
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
        std::move(call), log_, c10::cuda::getCurrentCUDAStream(device_.index()));
    track(pending);
    enqueuer_->submit(pending);
    return pending;
  }

  MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) override {
    throw_failure();
    const bool takes_part = request.color >= 0 && group_size > 1;
    std::shared_ptr<NcclComm> made;
    try {
      // NCCL splits a communicator only while no call is under way in it.
      for (const auto& call : outstanding()) call->wait_on_host(deadline);
      made = NcclComm::split(comm_, takes_part ? request.color : -1, request.key, deadline);
    } catch (const NcclError& error) {
      fail_split(
          engine_fault({.sequence = request.number, .operation = Operation::split}, error.what()));
    } catch (const CommError& error) {
      fail_split(error.details());
    }
    if (!takes_part) return nullptr;
    return [device = device_, made](LaneGroup group) {
      return std::make_unique<NcclLane>(std::move(group), device, made);
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
    changed_.notify_all();
    enqueuer_->clear();
    // The calls fail before the abort makes the device's work end with arbitrary numbers.
    for (const auto& call : calls) call->fail(fault);
    aborted_ = comm_->abort([calls] {
      for (const auto& call : calls) call->release();
    });
  }

  void check_results() override {
    const std::lock_guard lock(mutex_);
    if (fault_ && !*log_.failure_was_thrown) log_.raise(*fault_);
  }

  void leave() override {
    // Tells the others, which would otherwise wait for the calls that this rank will not make.
    if (std::uncaught_exceptions() > 0 && !failed())
      group_.failed({.fault = Fault::aborted,
                     .operation = "a call",
                     .ranks = {group_.info.rank},
                     .explanation = fmt::format("rank {} has left the group because of an error of "
                                                "its own",
                                                group_.info.rank)});
    try {
      // It is usual that nobody on the host has waited for the last work on the device; that work
      // may end.
      for (const auto& call : outstanding()) call->wait_on_host(Deadline::never());
    } catch (const CommError&) {
      // The group has failed.
    }
    stop();
  }

 private:
  int size() const { return static_cast<int>(group_.info.global_ranks.size()); }

  CommError::Details engine_fault(const Fingerprint& call, const std::string& text) const {
    return {.fault = Fault::engine,
            .operation = comm::name(call.operation),
            .group = group_.info.name,
            .sequence = call.sequence,
            .explanation = fmt::format("NCCL reports on {}: {}", device_.str(), text)};
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return fault_.has_value();
  }
  void throw_failure() const {
    const std::lock_guard lock(mutex_);
    if (fault_) log_.raise(*fault_);
  }
  [[noreturn]] void fail_split(const CommError::Details& fault) {
    group_.failed(fault);
    throw_failure();
    log_.raise(fault);
  }

  void track(const std::shared_ptr<DeviceCall>& call) {
    const std::lock_guard lock(mutex_);
    if (fault_) log_.raise(*fault_);
    outstanding_.push_back(call);
    changed_.notify_all();
  }

  std::deque<std::shared_ptr<DeviceCall>> outstanding() const {
    const std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // Releases the calls that have ended on the device, in the order of the stream. Returns the
  // oldest call that has not ended, or null.
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

  // Without a device of its own, this thread would make a context on the first GPU.
  void be_on_device() const noexcept {
    try {
      c10::cuda::set_device(device_.index());
    } catch (const std::exception& error) {
      log::error("while the calls of '{}' were watched: {}", group_.info.name, error.what());
    }
  }

  // Runs in a thread of its own, and watches calls that nobody on the host may be waiting for.
  void watch() {
    be_on_device();
    std::shared_ptr<DeviceCall> watched;
    Clock::time_point since, looked;
    std::optional<Clock::time_point> problem_since;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (outstanding_.empty())
        changed_.wait(lock, [this] { return stopping_ || !outstanding_.empty(); });
      else
        changed_.wait_for(lock, kPollEvery, [this] { return stopping_; });
      lock.unlock();
      try {
        const auto oldest = poll();
        const auto now = Clock::now();
        if (oldest != watched) since = now;
        watched = oldest;
        const std::string problem = oldest == nullptr ? "" : comm_->problem();
        if (problem.empty())
          problem_since.reset();
        else if (!problem_since)
          problem_since = now;
        if (problem_since && now - *problem_since >= kLookFirst)
          group_.failed(engine_fault(oldest->call().fingerprint, problem));
        const bool takes_its_time = oldest != nullptr && now - since >= kTakesItsTime;
        if ((takes_its_time || problem_since) && now - looked >= kLookEvery) {
          looked = now;
          group_.look(oldest->call().fingerprint);
        }
        check_deadlines(now);
      } catch (const std::exception& error) {
        log::error("while the calls of '{}' were watched: {}", group_.info.name, error.what());
      }
      lock.lock();
    }
  }

  void check_deadlines(Clock::time_point now) {
    for (const auto& one : outstanding()) {
      const Call& call = one->call();
      if (call.deadline.at() > now - kAfterDeadline) continue;
      return group_.failed(
          {.fault = Fault::timeout,
           .operation = comm::name(call.fingerprint.operation),
           .group = group_.info.name,
           .sequence = call.fingerprint.sequence,
           .explanation = fmt::format(
               "It was not over on {} of rank {} after {:.1f} s, and no rank is known not to have "
               "made it: this GPU, or one that it exchanges with, is busy with something else, or "
               "they do not get through to each other (NCCL_DEBUG=INFO says how NCCL connects "
               "them)",
               device_.str(), group_.info.rank, call.deadline.span_seconds())});
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    enqueuer_->stop();
  }

  const LaneGroup group_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<NcclComm> comm_;
  const std::shared_ptr<NcclEnqueuer> enqueuer_;
  const CallLog log_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<CommError::Details> fault_;
  std::deque<std::shared_ptr<DeviceCall>> outstanding_;
  std::future<void> aborted_;
  std::thread watcher_;
};

// Connects ranks that have no NCCL communicator in common: the first rank tells the others where to
// meet. Every rank takes part in that exchange, even if something is wrong with its GPU.
std::unique_ptr<DeviceLane> connect_anew(LaneGroup group, c10::Device device) {
  ncclUniqueId id{};
  std::exception_ptr fault;
  try {
    check_gpu();
    const c10::cuda::CUDAGuard on_device(device);
    (void)at::empty({1}, at::device(device));  // fails if the device cannot be used
    const NcclLibrary& nccl = NcclLibrary::get();
    if (group.info.rank == 0) nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
  } catch (...) {
    fault = std::current_exception();
  }
  const bool all_are_well = group.all_are_well(fault == nullptr);
  if (fault) std::rethrow_exception(fault);
  if (!all_are_well) throw NcclError("another rank could not begin: its own message says why");
  const at::Tensor bytes = at::from_blob(id.internal, {sizeof(id.internal)}, at::kByte);
  group.broadcast(bytes);
  const c10::cuda::CUDAGuard on_device(device);
  auto comm =
      NcclComm::connect(id, group.info.rank, static_cast<int>(group.info.global_ranks.size()),
                        Deadline::after(group.timeout));
  return std::make_unique<NcclLane>(std::move(group), device, std::move(comm));
}

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
    try {
      return connect_anew(std::move(group), device);
    } catch (const NcclError& error) {
      throw NcclError(fmt::format("NCCL {} on {} reports: {}", NcclLibrary::get().version(),
                                  device.str(), error.what()));
    }
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

}  // namespace lockstep::comm::backends

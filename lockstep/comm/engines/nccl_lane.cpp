// NCCL, called directly.
//
// Calls run on a stream of the lane's own, in their order, exchanges included: ranks must not rely
// on an exchange overtaking a collective. wait() orders the current stream and never blocks the
// host.
//
// What NCCL cannot promise (docs/engines.md has the whole list):
//   - Sums come in NCCL's order: within rounding of the canonical one. 16-bit all-reduces travel as
//     float32, because NCCL would round after each hop.
//   - The ledger compares calls beside them: kernels of a mismatched call may have run, on wrong
//     data, before it is found.
//   - The parts of an uneven all_to_all are not compared; where they do not fit, the call ends at
//     its deadline.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <lockstep/base/host_identity.h>
#include <lockstep/comm/engines/engine_group.h>
#include <lockstep/comm/engines/engines.h>
#include <lockstep/comm/engines/nccl_collectives.h>
#include <lockstep/comm/engines/nccl_library.h>
#include <lockstep/device/cuda.h>

namespace lockstep::comm::engines {

namespace {

// A call on the device: over when its event is. Thread-safe.
class DeviceCall final : public PendingCall {
 public:
  DeviceCall(std::shared_ptr<EngineCall> call, c10::Device device)
      : call_(std::move(call)), device_(device) {}

  // What has been enqueued on the stream so far is the call.
  void enqueued(const c10::cuda::CUDAStream& stream) { finished_.record(stream); }

  // Streams wait for each other.
  bool ready() const override { return true; }
  bool done() const override {
    if (call_->done()) return true;
    try {
      if (!finished_.query()) return false;
      call_->finish();
    } catch (const std::exception& error) {  // of CUDA: nothing more comes of this device
      call_->engine_failed(error.what());
    }
    return true;
  }

  void wait() override {
    // Throws what the call has failed with.
    if (call_->done()) return call_->wait_on_host(call_->call().deadline);
    finished_.block(c10::cuda::getCurrentCUDAStream(device_.index()));
  }

  void wait_on_host(Deadline deadline) override {
    if (!done()) {
      const EngineCall::Wait wait(*call_, deadline);
      const auto until = std::min(deadline.at(), call_->call().deadline.at());
      for (int polls = 0; !done() && Clock::now() < until; ++polls) {
        if (polls < 1000)
          std::this_thread::yield();
        else
          std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    call_->wait_on_host(deadline);
  }

  EngineCall& call() { return *call_; }

 private:
  const std::shared_ptr<EngineCall> call_;
  const c10::Device device_;
  mutable at::cuda::CUDAEvent finished_;
};

using Connect = std::function<std::shared_ptr<NcclComm>(
    const LaneGroup& group, const std::string& prefix, const Deadline& deadline)>;

// Connects ranks that have no communicator in common: they meet in the store.
Connect connect_anew(const std::shared_ptr<store::Store>& store) {
  return [store](const LaneGroup& group, const std::string& prefix, const Deadline& deadline) {
    ncclUniqueId id;
    const std::string key = prefix + "/id";
    if (group.info.rank == 0) {
      const NcclLibrary& nccl = NcclLibrary::get();
      nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
      store->set(key, {id.internal, sizeof(id.internal)}, deadline);
    } else {
      const std::string text = store->wait({key}, deadline).front();
      LOCKSTEP_CHECK(text.size() == sizeof(id.internal), "{} has {} bytes", key, text.size());
      std::memcpy(id.internal, text.data(), text.size());
    }
    auto comm = NcclComm::connect(id, group.info.rank,
                                  static_cast<int>(group.info.global_ranks.size()), deadline);
    if (group.info.rank == 0) store->remove(key, deadline);
    return comm;
  };
}

class NcclLane final : public DeviceLane {
 public:
  NcclLane(LaneGroup group, const EngineOptions& options, c10::Device device,
           const Connect& connect)
      : lane_group_(std::move(group)),
        options_(options),
        prefix_("nccl/" + lane_group_.id),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        comm_(connected(connect)) {
    // The group itself looks for circles of waits, and has the journal.
    GroupInfo info = lane_group_.info;
    info.watch = nullptr;
    group_ =
        std::make_shared<EngineGroup>(info, "nccl", lane_group_.recorder, LedgerMode::beside,
                                      [this](const CommError::Details& fault) { tell(fault); });
    group_->open(
        options_, prefix_, [this](const CommError::Details&) { comm_->abort(); },
        [this] {
          // A thread without a device of its own would make a context on the first GPU.
          c10::cuda::set_device(device_.index());
          poll();
        });
  }

  ~NcclLane() override {
    // The others must not wait for what this rank will not send.
    if (std::uncaught_exceptions() > 0)
      group_->fail({.fault = Fault::aborted,
                    .operation = "a call",
                    .group = lane_group_.info.name,
                    .ranks = {lane_group_.info.rank},
                    .explanation = fmt::format("rank {} has left the group because of an error of "
                                               "its own",
                                               lane_group_.info.rank)});
    wait_for_all();
    ended_ = true;
    const bool healthy = !group_->dead();
    // Where others have yet to come, what they have not received would be lost, or they never come.
    if (group_->close() && healthy) comm_->close();
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
    group_->check_alive(comm::name(call.fingerprint.operation));
    auto pending = std::make_shared<DeviceCall>(group_->begin(std::move(call)), device_);
    EngineCall& engine_call = pending->call();
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    const c10::cuda::CUDAStreamGuard guard(stream_);
    ready.block(stream_);
    engine_call.start();
    // From here on its deadline counts: the first call of a group connects, and waits for that.
    group_->track(engine_call.shared_from_this());
    try {
      enqueue_collective(*comm_, engine_call.call(), size(), stream_);
      pending->enqueued(stream_);
    } catch (const std::exception& error) {
      group_->engine_failed(engine_call, error.what());
      group_->check_alive(comm::name(engine_call.call().fingerprint.operation));
    }
    std::lock_guard lock(mutex_);
    outstanding_.push_back(pending);
    return pending;
  }

  MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) override {
    const bool takes_part = request.color >= 0 && group_size > 1;
    const std::shared_ptr<NcclComm> made = split_comm({.color = takes_part ? request.color : -1,
                                                       .key = request.key,
                                                       .name = request.name,
                                                       .number = request.number},
                                                      deadline);
    if (!takes_part) return nullptr;
    return [options = options_, device = device_, made](LaneGroup group) {
      return std::make_unique<NcclLane>(std::move(group), options, device,
                                        [made](const auto&...) { return made; });
    };
  }

  void end(const CommError::Details& fault) override {
    ended_ = true;
    group_->fail(fault);
  }

 private:
  int size() const { return static_cast<int>(lane_group_.info.global_ranks.size()); }

  std::shared_ptr<NcclComm> connected(const Connect& connect) {
    const c10::cuda::CUDAGuard on_device(device_);
    try {
      return connect(lane_group_, prefix_, Deadline::after(lane_group_.timeout));
    } catch (const NcclError& error) {
      throw CommError(
          {.fault = Fault::engine,
           .operation = "connecting nccl",
           .group = lane_group_.info.name,
           .explanation = fmt::format("NCCL {} on {} reports: {}", NcclLibrary::get().version(),
                                      device_.str(), error.what())});
    }
  }

  std::shared_ptr<NcclComm> split_comm(const SplitRequest& request, const Deadline& deadline) {
    group_->check_alive("split");
    const c10::cuda::CUDAGuard on_device(device_);
    // NCCL wants nothing under way in the communicator that it splits.
    for (const auto& call : outstanding()) call->wait_on_host(deadline);
    // Where a rank does not come, the deadline of this call ends it.
    const auto pending = group_->begin_split(request, deadline);
    try {
      auto comm = NcclComm::split(*comm_, request.color, request.key);
      pending->finish();
      return comm;
    } catch (const NcclError& error) {
      group_->engine_failed(*pending, error.what());
      group_->check_alive("split");
      throw;
    }
  }

  // Called once, when the group of calls has failed for any reason.
  void tell(const CommError::Details& fault) {
    if (!ended_.exchange(true)) lane_group_.failed(fault);
  }

  std::deque<std::shared_ptr<DeviceCall>> outstanding() {
    std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // Work on the device that nobody waits for on the host is nothing unusual: it may end.
  void wait_for_all() {
    try {
      for (const auto& call : outstanding()) call->wait_on_host(call->call().call().deadline);
    } catch (const Error&) {
      // The group is dead.
    }
  }

  // Notices what has ended on the device, in the order of its stream, and what NCCL reports.
  void poll() {
    std::shared_ptr<DeviceCall> oldest;
    while (true) {
      {
        std::lock_guard lock(mutex_);
        if (oldest != nullptr && !outstanding_.empty() && outstanding_.front() == oldest)
          outstanding_.pop_front();
        if (outstanding_.empty()) return;
        oldest = outstanding_.front();
      }
      if (!oldest->done()) break;
    }
    const std::string problem = comm_->problem();
    if (!problem.empty() && !oldest->done()) group_->engine_failed(oldest->call(), problem);
  }

  const LaneGroup lane_group_;
  const EngineOptions options_;
  const std::string prefix_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  const std::shared_ptr<NcclComm> comm_;
  std::shared_ptr<EngineGroup> group_;
  std::atomic<bool> ended_{false};  // the group knows, or does not want to
  std::mutex mutex_;
  std::deque<std::shared_ptr<DeviceCall>> outstanding_;
};

void check_gpu() {
  if (c10::cuda::device_count() == 0)
    throw UsageError("the backend 'nccl' needs a GPU, and this process sees none: use the backend "
                     "shm or tcp, or check nvidia-smi and CUDA_VISIBLE_DEVICES");
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

MakeLane nccl_lanes(const EngineOptions& options, c10::Device device) {
  return [options, device](LaneGroup group) -> std::unique_ptr<DeviceLane> {
    check_gpu();
    return std::make_unique<NcclLane>(std::move(group), options, device,
                                      connect_anew(options.store));
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

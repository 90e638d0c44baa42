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
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <lockstep/comm/engines/engine_group.h>
#include <lockstep/comm/engines/engines.h>
#include <lockstep/comm/engines/nccl_collectives.h>
#include <lockstep/comm/engines/nccl_library.h>

namespace lockstep::comm::engines {

namespace {

// A call on the device: over when its event is. Thread-safe.
class DeviceCall final : public PendingCall {
 public:
  explicit DeviceCall(std::shared_ptr<EngineCall> call) : call_(std::move(call)) {}

  // What has been enqueued on the stream so far is the call.
  void enqueued(const c10::cuda::CUDAStream& stream) { finished_.record(stream); }

  // Streams wait for each other.
  bool ready() const override { return true; }
  bool done() const override {
    if (call_->done()) return true;
    if (!finished_.query()) return false;
    call_->finish();
    return true;
  }

  void wait() override {
    // Throws what the call has failed with.
    if (call_->done()) return call_->wait_on_host(call_->call().deadline);
    finished_.block(c10::cuda::getCurrentCUDAStream());
  }

  void wait_on_host(Deadline deadline) override {
    const auto until = std::min(deadline.at(), call_->call().deadline.at());
    for (int polls = 0; !done() && Clock::now() < until; ++polls) {
      if (polls < 1000)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    call_->wait_on_host(deadline);
  }

  EngineCall& call() { return *call_; }

 private:
  const std::shared_ptr<EngineCall> call_;
  mutable at::cuda::CUDAEvent finished_;
};

using Connect = std::function<std::unique_ptr<NcclComm>(
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
  NcclLane(LaneGroup group, const EngineOptions& options, const Connect& connect)
      : lane_group_(std::move(group)),
        options_(options),
        prefix_("nccl/" + lane_group_.id),
        device_(c10::DeviceType::CUDA, c10::cuda::current_device()),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())) {
    // The group itself looks for circles of waits.
    GroupInfo info = lane_group_.info;
    info.watch = nullptr;
    group_ = std::make_shared<EngineGroup>(info, "nccl", lane_group_.recorder, LedgerMode::beside);
    comm_ = connected(connect);
    group_->open(
        options_, prefix_, [this](const CommError::Details& fault) { failed(fault); },
        [this] { poll(); });
  }

  ~NcclLane() override {
    // Work on the device that nobody waits for on the host is nothing unusual: let it end.
    for (const auto& call : outstanding()) {
      try {
        call->wait_on_host(call->call().call().deadline);
      } catch (const Error&) {
        break;  // the group is dead
      }
    }
    ended_ = true;
    group_->close();
  }

  std::string name() const override { return "nccl"; }

  void check(Operation operation, const at::Tensor& tensor) const override {
    if (tensor.device() == device_) return;
    throw UsageError("{}: the tensor is on {}, but this rank's GPU is {}: move it with .to(\"{}\")",
                     comm::name(operation), tensor.device().str(), device_.str(), device_.str());
  }

  std::shared_ptr<PendingCall> start(Call call) override {
    group_->check_alive(comm::name(call.fingerprint.operation));
    poll();
    const c10::cuda::CUDAGuard on_device(device_);
    auto pending = std::make_shared<DeviceCall>(group_->begin(std::move(call)));
    EngineCall& engine_call = pending->call();
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    const c10::cuda::CUDAStreamGuard guard(stream_);
    ready.block(stream_);
    engine_call.start();
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

  MakeLane split(const SplitRequest& request) override {
    return [this, request](LaneGroup group) -> std::unique_ptr<DeviceLane> {
      const bool alone = group.info.global_ranks.size() == 1;
      Connect connect = connect_anew(options_.store);
      if (NcclLibrary::get().comm_split != nullptr) {
        auto comm = std::make_shared<std::unique_ptr<NcclComm>>(
            split_comm(request, Deadline::after(group.timeout)));
        connect = [comm](const auto&...) { return std::move(*comm); };
      }
      if (alone) return nullptr;
      return std::make_unique<NcclLane>(std::move(group), options_, connect);
    };
  }

  void sit_out(const SplitRequest& request, Deadline deadline) override {
    if (NcclLibrary::get().comm_split != nullptr) split_comm(request, deadline);
  }

  void end(const CommError::Details& fault) override {
    ended_ = true;
    group_->end(fault);
  }

 private:
  int size() const { return static_cast<int>(lane_group_.info.global_ranks.size()); }

  std::unique_ptr<NcclComm> connected(const Connect& connect) {
    const Deadline deadline = Deadline::after(lane_group_.timeout);
    try {
      return connect(lane_group_, prefix_, deadline);
    } catch (const NcclError& error) {
      throw CommError({.fault = Fault::engine,
                       .operation = "connecting nccl",
                       .group = lane_group_.info.name,
                       .explanation = fmt::format("NCCL {} on {} reports: {}",
                                                  NcclLibrary::get().version(), device_.str(),
                                                  error.what())});
    }
  }

  std::unique_ptr<NcclComm> split_comm(const SplitRequest& request, const Deadline& deadline) {
    group_->check_alive("split");
    const c10::cuda::CUDAGuard on_device(device_);
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

  // Called by the group of calls, once, when it has failed for any reason.
  void failed(const CommError::Details& fault) {
    if (!ended_.exchange(true)) lane_group_.failed(fault);
    comm_->abort();
  }

  std::vector<std::shared_ptr<DeviceCall>> outstanding() {
    std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // Notices what has ended on the device, and what NCCL reports.
  void poll() {
    std::shared_ptr<DeviceCall> oldest;
    {
      std::lock_guard lock(mutex_);
      std::erase_if(outstanding_, [](const auto& call) { return call->done(); });
      if (outstanding_.empty()) return;
      oldest = outstanding_.front();
    }
    const std::string problem = comm_->problem();
    if (!problem.empty() && !oldest->done()) group_->engine_failed(oldest->call(), problem);
  }

  const LaneGroup lane_group_;
  const EngineOptions options_;
  const std::string prefix_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  std::unique_ptr<NcclComm> comm_;
  std::shared_ptr<EngineGroup> group_;
  std::atomic<bool> ended_{false};  // the group knows, or does not want to
  std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceCall>> outstanding_;
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
}

MakeLane nccl_lanes(const EngineOptions& options) {
  return [options](LaneGroup group) -> std::unique_ptr<DeviceLane> {
    check_gpu();
    if (group.info.global_ranks.size() == 1) return nullptr;
    return std::make_unique<NcclLane>(std::move(group), options, connect_anew(options.store));
  };
}

std::string gpu_identity() {
  if (c10::cuda::device_count() == 0) return "";
  const auto* const properties = at::cuda::getCurrentDeviceProperties();
  std::string text;
  for (const char byte : properties->uuid.bytes)
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace lockstep::comm::engines

#include <lockstep/comm/engines/nccl_communicator.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/engines/c10d_store.h>
#include <lockstep/comm/engines/engine_group.h>
#include <lockstep/comm/engines/engine_text.h>
#include <lockstep/comm/engines/host_communicator.h>
#include <lockstep/comm/engines/nccl_collectives.h>
#include <lockstep/comm/engines/split_plan.h>

namespace lockstep::comm::engines {

namespace {

// c10d ends the process at its own timeout; deadlines are ours.

// A call on the device: over when its event is. Thread-safe.
class DeviceCall final : public PendingCall {
 public:
  explicit DeviceCall(std::shared_ptr<EngineCall> call) : call_(std::move(call)) {}

  // What has been enqueued on the stream so far is the call.
  void enqueued(const c10::cuda::CUDAStream& stream, std::vector<NcclWork> works) {
    works_ = std::move(works);
    finished_.record(stream);
  }

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

  // What NCCL has reported about it; empty where nothing.
  std::string problem() const {
    for (const NcclWork& work : works_) {
      const std::exception_ptr error = work->exception();
      if (!error) continue;
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& exception) {
        return exception.what();
      }
    }
    return "";
  }

  EngineCall& call() { return *call_; }

 private:
  const std::shared_ptr<EngineCall> call_;
  mutable at::cuda::CUDAEvent finished_;
  std::vector<NcclWork> works_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const GroupInfo& info, const EngineOptions& options, std::string prefix,
                   const Deadline& deadline)
      : Communicator(info, options.timeout),
        options_(options),
        prefix_(std::move(prefix)),
        device_(c10::DeviceType::CUDA, c10::cuda::current_device()),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
        group_(std::make_shared<EngineGroup>(
            this->info(), "nccl", shared_recorder(),
            options.ledger == LedgerMode::automatic ? LedgerMode::beside : options.ledger)) {
    connect(deadline);
    group_->open(
        options_, prefix_, [this] { pg_->abort(); }, [this] { poll(); });
  }

  ~NcclCommunicator() override {
    // Work on the device that nobody waits for on the host is nothing unusual: let it end.
    for (const auto& call : outstanding()) {
      try {
        call->wait_on_host(call->call().call().deadline);
      } catch (const Error&) {
        break;  // the group is dead
      }
    }
    group_->close();
    if (!failed_) pg_->shutdown();
  }

  std::string backend() const override { return "nccl"; }
  bool canonical_order() const override { return false; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return std::nullopt; }

 private:
  void connect(const Deadline& deadline) {
    if (size() > 1) gather_ranks(info(), "nccl", *options_.store, prefix_, deadline);
    // An error of NCCL's is ours to report: c10d would end the process.
    set_environment_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0");
    auto settings = c10d::ProcessGroupNCCL::Options::create();
    settings->timeout = kNever;
    const auto left = std::chrono::ceil<milliseconds>(deadline.remaining());
    c10::intrusive_ptr<c10d::Store> store;
    if (size() > 1)
      store = make_c10d_store(options_.store, prefix_ + "/nccl", left);
    else
      store = c10::make_intrusive<c10d::HashStore>();
    try {
      pg_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank(), size(), settings);
      // NCCL connects at the first call, which all ranks have to make.
      const c10::cuda::CUDAStreamGuard guard(stream_);
      std::vector<at::Tensor> token{
          at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_))};
      engine().allreduce(token)->wait();
      wait_for_stream(deadline, "connecting nccl");
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CommError({.fault = Fault::engine,
                       .operation = "connecting nccl",
                       .group = name(),
                       .explanation = fmt::format("nccl on {} reports: {}", device_.str(),
                                                  engine_text(error.what()))});
    }
    if (size() > 1) options_.store->remove(fmt::format("{}/here{}", prefix_, rank()), deadline);
  }

  // Blocks until our stream has done what is on it now.
  void wait_for_stream(const Deadline& deadline, const char* what) {
    at::cuda::CUDAEvent reached;
    reached.record(stream_);
    while (!reached.query()) {
      if (deadline.passed()) {
        pg_->abort();
        throw CommError({.fault = Fault::timeout,
                         .operation = what,
                         .group = name(),
                         .explanation = fmt::format("nccl had not done it after {:.1f} s",
                                                    deadline.span_seconds())});
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  // Through the base class: newer versions have renamed some methods in the derived one.
  c10d::Backend& engine() { return *pg_; }

  std::shared_ptr<PendingCall> do_start(Call call) override {
    group_->check_alive(comm::name(call.fingerprint.operation));
    poll();
    const c10::cuda::CUDAGuard on_device(device_);
    auto pending = std::make_shared<DeviceCall>(group_->begin(std::move(call)));
    EngineCall& engine_call = pending->call();
    compare(engine_call);
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    const c10::cuda::CUDAStreamGuard guard(stream_);
    ready.block(stream_);
    engine_call.start();
    try {
      pending->enqueued(stream_, enqueue_collective(engine(), engine_call.call(), size(), device_));
    } catch (const std::exception& error) {
      failed_ = true;
      group_->engine_failed(engine_call, error.what());
      group_->check_alive(comm::name(engine_call.call().fingerprint.operation));
    }
    {
      std::lock_guard lock(mutex_);
      outstanding_.push_back(pending);
    }
    group_->track(engine_call.shared_from_this());
    return pending;
  }

  void compare(EngineCall& call) {
    try {
      group_->compare(call);
    } catch (const CommError& error) {
      group_->fail(error.details());
      group_->check_alive(comm::name(call.call().fingerprint.operation));
    }
  }

  std::vector<std::shared_ptr<DeviceCall>> outstanding() {
    std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // Notices what has ended on the device, and what NCCL reports.
  void poll() {
    for (const auto& call : outstanding()) {
      const std::string problem = call->problem();
      if (!problem.empty() && !call->done()) {
        failed_ = true;
        group_->engine_failed(call->call(), problem);
      }
    }
    std::lock_guard lock(mutex_);
    std::erase_if(outstanding_, [](const auto& call) { return call->done(); });
  }

  std::shared_ptr<Communicator> do_split(const SplitRequest& request, Deadline deadline) override {
    group_->check_alive("split");
    const c10::cuda::CUDAGuard on_device(device_);
    auto pending = group_->begin_split(request, deadline);
    compare(*pending);
    const auto options = at::TensorOptions().dtype(at::kLong);
    const at::Tensor wish = at::empty({2}, options);
    wish.data_ptr<std::int64_t>()[0] = request.color;
    wish.data_ptr<std::int64_t>()[1] = request.key;
    at::Tensor wishes;
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      at::Tensor mine = wish.to(device_);
      at::Tensor all = at::empty({size() * 2}, options.device(device_));
      engine()._allgather_base(all, mine)->wait();
      wait_for_stream(deadline, "split");
      wishes = all.cpu();
    }
    const GroupInfo child = plan_split(info(), request, wishes.data_ptr<std::int64_t>());
    std::shared_ptr<Communicator> result;
    if (request.color >= 0) {
      EngineOptions child_options = options_;
      child_options.timeout = timeout();
      result = std::make_shared<NcclCommunicator>(
          child, child_options, fmt::format("{}/s{}.{}", prefix_, request.number, request.color),
          deadline);
    }
    pending->finish();
    return result;
  }

  void do_abort(const std::string& reason) override {
    failed_ = true;
    group_->fail({.fault = Fault::aborted,
                  .operation = "abort",
                  .group = name(),
                  .ranks = {rank()},
                  .explanation = fmt::format("rank {} ended the group: {}", rank(), reason)});
  }

  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device_));
  }

  void do_check(Operation operation, const at::Tensor& tensor) const override {
    if (tensor.device() == device_) return;
    throw UsageError("{}: the tensor is on {}, but this nccl group is on {}: move it with "
                     ".to(\"{}\"){}",
                     comm::name(operation), tensor.device().str(), device_.str(), device_.str(),
                     tensor.device().is_cpu() ? ", or use the backend shm or tcp" : "");
  }

  const EngineOptions options_;
  const std::string prefix_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  std::shared_ptr<EngineGroup> group_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> pg_;
  std::atomic<bool> failed_{false};  // aborted, or about to be: c10d cannot be shut down in order
  std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceCall>> outstanding_;
};

}  // namespace

std::shared_ptr<Communicator> make_nccl(const GroupInfo& group, const EngineOptions& options) {
  if (c10::cuda::device_count() == 0)
    throw UsageError("the engine 'nccl' needs a GPU, and this process sees none: use the backend "
                     "shm or tcp, or check nvidia-smi and CUDA_VISIBLE_DEVICES");
  return std::make_shared<NcclCommunicator>(group, options, claim_prefix(group, "nccl", options),
                                            Deadline::after(options.timeout));
}

}  // namespace lockstep::comm::engines

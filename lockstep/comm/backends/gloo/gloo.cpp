#include <lockstep/comm/backends/gloo/gloo.h>

#include <mutex>
#include <set>

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO  // c10d's header is empty without
#endif
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/backends/engine/host_communicator.h>

namespace lockstep::comm::backends {

namespace {

using Bytes = std::vector<std::uint8_t>;

std::string to_text(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// The part of a JobStore that its clones share: the store, and the keys to remove.
class Shared {
 public:
  Shared(std::shared_ptr<store::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  ~Shared() {
    try {
      for (const std::string& key : written_) store_->remove(key, Deadline::after(kTidyUp));
    } catch (const Error& error) {
      log::debug("keys of {} stay behind: {}", prefix_, error.what());
    }
  }

  store::Store& store() { return *store_; }
  std::string name(const std::string& key) const { return prefix_ + "/" + key; }

  std::string written(const std::string& key) {
    std::lock_guard lock(mutex_);
    return *written_.insert(name(key)).first;
  }
  void removed(const std::string& key) {
    std::lock_guard lock(mutex_);
    written_.erase(name(key));
  }

 private:
  static constexpr milliseconds kTidyUp{5000};

  std::shared_ptr<store::Store> store_;
  std::string prefix_;
  std::mutex mutex_;
  std::set<std::string> written_;
};

class JobStore final : public c10d::Store {
 public:
  JobStore(std::shared_ptr<Shared> shared, milliseconds timeout)
      : c10d::Store(timeout), shared_(std::move(shared)) {}

  // Overrides c10d::Store::clone() in the versions that have it.
  c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<JobStore>(shared_, timeout_);
  }

  void set(const std::string& key, const Bytes& value) override {
    shared_->store().set(shared_->written(key), to_text(value), deadline());
  }

  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& wanted) override {
    const auto expected = current.empty() ? std::nullopt : std::optional(to_text(current));
    return to_bytes(shared_->store().compare_and_set(shared_->written(key), expected,
                                                     to_text(wanted), deadline()));
  }

  // Blocks until the key is there, as c10d's stores do.
  Bytes get(const std::string& key) override {
    return to_bytes(shared_->store().wait({shared_->name(key)}, deadline()).front());
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    return shared_->store().add(shared_->written(key), value, deadline());
  }

  bool deleteKey(const std::string& key) override {
    const bool existed = shared_->store().remove(shared_->name(key), deadline());
    shared_->removed(key);
    return existed;
  }

  bool check(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys)
      if (!shared_->store().get(shared_->name(key), deadline())) return false;
    return true;
  }

  std::int64_t getNumKeys() override {
    TORCH_CHECK(false, "the job's store does not count its keys");
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    std::vector<std::string> names;
    for (const std::string& key : keys) names.push_back(shared_->name(key));
    shared_->store().wait(names, Deadline::after(timeout));
  }

 private:
  Deadline deadline() const { return Deadline::after(timeout_); }

  std::shared_ptr<Shared> shared_;
};

// Makes the job's store look like c10d's. All keys get the prefix. The last clone to go removes the
// keys that any of them set. Thread-safe.
c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<store::Store> store,
                                                std::string prefix, milliseconds timeout) {
  return c10::make_intrusive<JobStore>(
      std::make_shared<Shared>(std::move(store), std::move(prefix)), timeout);
}

c10d::ReduceOp c10d_op(BasicOp op) {
  switch (op) {
    case BasicOp::min: return c10d::ReduceOp::MIN;
    case BasicOp::max: return c10d::ReduceOp::MAX;
    case BasicOp::sum: break;
  }
  return c10d::ReduceOp::SUM;
}

// c10d takes tags from 0 to the largest int; the last one is for interrupting.
constexpr int kInterruptTag = std::numeric_limits<int>::max();

int tag_of(std::uint64_t sequence) { return static_cast<int>(sequence % kInterruptTag); }

// c10d's group, with a timeout for connecting and none afterwards.
class Group final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  void never_time_out() {
    options_->timeout = kNever;
    for (const auto& context : contexts_) context->setTimeout(kNever);
  }
};

class GlooEngine final : public HostEngine {
 public:
  GlooEngine(const GroupInfo& group, EngineOptions options, const std::string& prefix,
             const Deadline& deadline)
      : rank_(group.rank),
        size_(static_cast<int>(group.global_ranks.size())),
        options_(std::move(options)) {
    gather_ranks(group, "gloo", *options_.store, prefix, deadline);
    const auto left = std::chrono::ceil<milliseconds>(deadline.remaining());
    auto settings = c10d::ProcessGroupGloo::Options::create(left);
    try {
      settings->devices.push_back(
          c10d::ProcessGroupGloo::createDeviceForHostname(options_.bind_address));
      pg_ = c10::make_intrusive<Group>(make_c10d_store(options_.store, prefix + "/gloo", left),
                                       rank_, size_, settings);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CommError(
          {.fault = Fault::engine,
           .operation = "connecting gloo",
           .group = group.name,
           .explanation = fmt::format("gloo, bound to {}, reports: {}", options_.bind_address,
                                      engine_text(error.what()))});
    }
    pg_->never_time_out();
    options_.store->remove(fmt::format("{}/here{}", prefix, rank_), deadline);
  }

  std::string name() const override { return "gloo"; }

  void all_reduce(const at::Tensor& tensor, BasicOp op, const Deadline& deadline) override {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op);
    std::vector<at::Tensor> tensors{tensor};
    finish(issue([&] { return pg_->allreduce(tensors, options); }), deadline);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input,
                  const Deadline& deadline) override {
    std::vector<std::vector<at::Tensor>> outputs{output.chunk(size_)};
    std::vector<at::Tensor> inputs{input};
    finish(issue([&] { return pg_->allgather(outputs, inputs); }), deadline);
  }

  void broadcast(const at::Tensor& tensor, int root, const Deadline& deadline) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{tensor};
    finish(issue([&] { return pg_->broadcast(tensors, options); }), deadline);
  }

  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const std::vector<std::int64_t>& output_bytes,
                  const std::vector<std::int64_t>& input_bytes, const Deadline& deadline) override {
    at::Tensor to = output;
    at::Tensor from = input;
    auto to_counts = output_bytes;
    auto from_counts = input_bytes;
    finish(issue([&] { return pg_->alltoall_base(to, from, to_counts, from_counts); }), deadline);
  }

  void barrier(const Deadline& deadline) override {
    finish(issue([&] { return pg_->barrier(); }), deadline);
  }

  void exchange(const std::vector<Transfer>& transfers, const std::vector<std::uint64_t>& sequences,
                const Deadline& deadline) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      std::vector<at::Tensor> bytes{byte_alias(transfers[i].tensor)};
      const int peer = transfers[i].peer;
      const int tag = tag_of(sequences[i]);
      works.push_back(issue([&] {
        return transfers[i].direction == Transfer::Direction::send ? pg_->send(bytes, peer, tag)
                                                                   : pg_->recv(bytes, peer, tag);
      }));
    }
    for (const auto& work : works) finish(work, deadline);
  }

  std::unique_ptr<HostEngine> split(const GroupInfo* child, int, int, const std::string& prefix,
                                    const Deadline& deadline) override {
    if (child == nullptr || child->global_ranks.size() == 1) return nullptr;
    return std::make_unique<GlooEngine>(*child, options_, prefix, deadline);
  }

  // Gloo cannot be cancelled, but a receive that times out makes it fail everything in its context,
  // and closes the connections so that peers fail too.
  void interrupt() override {
    try {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      issue([&] {
        return pg_->recv(nothing, (rank_ + 1) % size_, kInterruptTag);
      })->wait(milliseconds(1));
    } catch (const std::exception&) {
      // The receive timed out, as intended.
    }
  }

 private:
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> issue(const Start& start) {
    std::lock_guard lock(issuing_);
    return start();
  }

  static void finish(const c10::intrusive_ptr<c10d::Work>& work, const Deadline& deadline) {
    // Gloo takes 0 as "for ever".
    const auto left =
        std::max(std::chrono::ceil<milliseconds>(deadline.remaining()), milliseconds(1));
    if (!work->wait(std::min(left, kNever))) throw std::runtime_error("the call was cancelled");
  }

  const int rank_;
  const int size_;
  const EngineOptions options_;
  std::mutex issuing_;
  c10::intrusive_ptr<Group> pg_;
};

}  // namespace

std::shared_ptr<Communicator> make_gloo(const GroupInfo& group, const EngineOptions& asked_for) {
  const EngineOptions options = asked_for.with_ledger(LedgerMode::before);
  const std::string prefix = claim_prefix(group, "gloo", options);
  std::unique_ptr<HostEngine> engine;
  if (group.global_ranks.size() > 1)
    engine = std::make_unique<GlooEngine>(group, options, prefix, Deadline::after(options.timeout));
  return std::make_shared<HostCommunicator>(group, "gloo", std::move(engine), options, prefix);
}

}  // namespace lockstep::comm::backends

#include "own_backend.h"

#include <atomic>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/backends.h>

namespace lockstep::comm::conformance {

namespace {

std::atomic<int> num_calls{0};

// A call of the inner group that is noted in the outer group's flight recorder.
class ForwardedCall final : public PendingCall {
 public:
  ForwardedCall(Work inner, std::shared_ptr<flight::Recorder> recorder, std::uint64_t entry)
      : inner_(std::move(inner)), recorder_(std::move(recorder)), entry_(entry) {
    recorder_->mark(entry_, flight::State::started);
  }

  bool done() const override { return inner_.done(); }
  bool ready() const override { return inner_.ready(); }
  void wait() override {
    note([this] { inner_.wait(); });
  }
  void wait_on_host(Deadline deadline) override {
    note([&] { inner_.wait_on_host(deadline); });
  }

 private:
  template <typename Wait>
  void note(const Wait& wait) {
    try {
      wait();
    } catch (...) {
      recorder_->mark(entry_, flight::State::failed);
      throw;
    }
    recorder_->mark(entry_, flight::State::finished);
  }

  Work inner_;
  const std::shared_ptr<flight::Recorder> recorder_;
  const std::uint64_t entry_;
};

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(const GroupInfo& group, std::shared_ptr<Communicator> inner)
      : Communicator(group, inner->timeout()), inner_(std::move(inner)) {}

  std::string backend() const override { return kOwnBackend; }
  bool canonical_order() const override { return inner_->canonical_order(); }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override {
    return inner_->sent_bytes();
  }

 private:
  std::shared_ptr<PendingCall> do_start(Call call) override {
    ++num_calls;
    return std::make_shared<ForwardedCall>(forward(call), shared_recorder(), call.flight_entry);
  }

  Work forward(const Call& call) {
    const Fingerprint& about = call.fingerprint;
    const bool roots = about.operation == Operation::broadcast;
    const CallOptions options{.timeout = std::chrono::ceil<milliseconds>(call.deadline.remaining()),
                              .algorithm = about.algorithm,
                              .launch = call.launch,
                              .divisor = call.divisor,
                              .subject = roots ? -1 : about.root};
    const bool from_one = call.inputs.size() == 1, to_one = call.outputs.size() == 1;
    switch (about.operation) {
      case Operation::all_reduce: return inner_->all_reduce(call.outputs, about.reduce_op, options);
      case Operation::all_gather:
        return to_one ? inner_->all_gather(call.outputs.front(), call.inputs.front(), options)
                      : inner_->all_gather(call.outputs, call.inputs.front(), options);
      case Operation::reduce_scatter:
        return from_one ? inner_->reduce_scatter(call.outputs.front(), call.inputs.front(),
                                                 about.reduce_op, options)
                        : inner_->reduce_scatter(call.outputs.front(), call.inputs, about.reduce_op,
                                                 options);
      case Operation::all_to_all:
        return from_one ? inner_->all_to_all(call.outputs.front(), call.inputs.front(), options)
                        : inner_->all_to_all(call.outputs, call.inputs, options);
      case Operation::broadcast: return inner_->broadcast(call.outputs, about.root, options);
      case Operation::exchange: return inner_->exchange(call.transfers, options);
      case Operation::barrier: return inner_->barrier(options);
      case Operation::split: break;
    }
    throw UsageError("{} is no call", comm::name(about.operation));
  }

  std::shared_ptr<Communicator> do_split(const SplitRequest& request, Deadline) override {
    auto made = inner_->split(request.color, request.key, request.name, request.tensors);
    if (made == nullptr) return nullptr;
    GroupInfo group = info();
    group.name = request.name;
    group.rank = made->rank();
    group.global_ranks = made->global_ranks();
    auto counting = std::make_shared<CountingCommunicator>(group, std::move(made));
    counting->set_timeout(timeout());
    return counting;
  }

  void do_abort(const std::string& reason) override { inner_->abort(reason); }
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return inner_->allocate(sizes, dtype);
  }
  void do_check(Operation operation, const at::Tensor& tensor) const override {
    if (!tensor.device().is_cpu())
      throw UsageError("{}: the tensor is on {}, and '{}' takes tensors on the CPU",
                       comm::name(operation), tensor.device().str(), kOwnBackend);
  }

  const std::shared_ptr<Communicator> inner_;
};

}  // namespace

void register_own_backend() {
  register_backend({.can = {.name = kOwnBackend,
                            .title = "the counting backend",
                            .sums = backends::Sums::canonical,
                            .inside_a_host = "tcp",
                            .between_hosts = "tcp"},
                    .make = [](const GroupInfo& group, const GroupOptions& options) {
                      return std::make_shared<CountingCommunicator>(
                          group, make_group("tcp", group, options));
                    }});
}

int num_calls_of_own_backend() { return num_calls; }

}  // namespace lockstep::comm::conformance

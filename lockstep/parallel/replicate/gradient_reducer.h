// Sums gradients over ranks while backward still computes the rest of them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/named_tensor.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {

// What the ranks' losses came to in one step. It lives on the parameters' device, so that asking
// for it is what waits.
struct StepTotals {
  at::Tensor values;  // [2] of float64: the samples (or tokens) of all ranks, and their summed loss

  double count() const;
  double mean_loss() const;
};

// Hooks into the gradient accumulator of each parameter. Gradients become views of buckets, in
// memory that the group reaches without a copy; a bucket leaves when its last gradient is ready and
// those before it have left, so that all ranks send the same ones in the same order. The order is
// that of registration, backwards, in the first step, and from then on the one in which gradients
// became ready on rank 0.
//
// Ownership: shares the parameters, keeps their accumulators alive; its hooks do nothing once it is
// gone. Threading: backward passes one at a time, on any threads of autograd.
// Failure: UsageError and CommError come out of the backward() during which they happen.
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  // `parameters` are distinct and all require gradients; `buffers` are broadcast from rank 0 after
  // each reduction.
  static std::shared_ptr<GradientReducer> make(std::vector<NamedTensor> parameters,
                                               std::vector<NamedTensor> buffers,
                                               std::shared_ptr<comm::Communicator> group,
                                               Options options);
  ~GradientReducer();

  // Whether backward passes exchange gradients at their end, or add to what is there.
  void set_exchange(bool on);
  bool exchange() const { return exchange_; }

  // Announces a backward pass whose loss is a sum over `count` samples: at the next exchange the
  // summed gradients are divided by the samples of all ranks and passes, and not by the number of
  // ranks. All ranks do this in a step, or none.
  void add_loss(const at::Tensor& loss_sum, std::int64_t count);

  // Takes part in the other ranks' exchange without a backward pass of its own.
  void exchange_now();

  // Of the last exchange that add_loss() was called for.
  const StepTotals& totals() const { return totals_; }

  std::size_t num_buckets() const { return buckets_.size(); }
  std::int64_t num_exchanges() const { return num_exchanges_; }

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  class Hook;

  struct Slot {
    std::string name;
    at::Tensor parameter;
    Accumulator accumulator;
    std::uintptr_t hook = 0;
    std::size_t bucket = 0;
    at::Tensor view;     // of its bucket
    bool ready = false;  // in this backward pass
    bool used = false;   // in any pass since the last exchange
  };
  struct Bucket {
    GradientBucket content;
    std::vector<std::size_t> members;  // slots
    std::size_t pending = 0;
    comm::Work work;
    std::function<void()> complete;  // of a hook
  };

  GradientReducer(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                  std::shared_ptr<comm::Communicator> group, Options options);

  void install_hooks();
  void build_buckets(const std::vector<std::size_t>& order);
  void on_gradient(std::size_t index);
  void finish();
  void place(Slot& slot);
  void launch_ready();
  void launch(Bucket& bucket);
  void refuse_unused(const std::vector<std::size_t>& unused);
  void check_zeroed() const;
  bool divides_by_count() const { return loss_sum_.defined(); }
  at::Tensor exchange_totals();
  void complete_buckets(const at::Tensor& totals);
  void hand_out(const std::vector<std::size_t>& without_gradient, const at::Tensor& totals);
  void learn_order();
  c10::Device device() const;

  std::shared_ptr<comm::Communicator> group_;
  Options options_;
  std::vector<NamedTensor> buffers_;
  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::size_t next_bucket_ = 0;           // to leave
  std::vector<std::size_t> ready_order_;  // of this pass
  bool exchange_ = true;
  bool in_backward_ = false;
  std::int64_t num_exchanges_ = 0;
  std::int64_t count_ = 0;  // of add_loss() since the last exchange
  at::Tensor loss_sum_;     // likewise; undefined where it was not called
  StepTotals totals_;
};

}  // namespace lockstep::replicate

// Sums gradients over ranks while backward still computes the rest of them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/named_tensor.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/gradient_hook.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {

using data_parallel::CountedPass;
using data_parallel::StepTotals;

// Hooks into the gradient accumulator of each parameter. A bucket of gradients leaves when its last
// one is ready and those before it have left, so that all ranks send the same ones in the same
// order. The order is that of registration, backwards, in the first step, and from then on the one
// in which gradients became ready on the first rank that had any. On the CPU gradients are summed
// where autograd put them; on other devices, and for a hook, they become views of a bucket's
// memory.
//
// Passes come in two kinds: the caller's own loss.backward(), at whose end the mean over the ranks
// is taken, and backward(loss_sum, count) here. A graph that runs another backward inside its own
// (reentrant checkpoints) exchanges once in the second, and at the end of each in the first.
//
// Ownership: shares the parameters, keeps their accumulators alive; its hooks do nothing once it is
// gone. Threading: backward passes one at a time, on any threads of autograd.
// Failure: UsageError and CommError come out of the backward() during which they happen.
class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  struct Tensors {
    std::vector<NamedTensor> trained;  // distinct parameters that require gradients
    std::vector<NamedTensor> frozen;   // distinct parameters that do not, and must not later
    std::vector<NamedTensor> buffers;  // broadcast from rank 0 after each exchange
  };
  static std::shared_ptr<GradientReducer> make(Tensors tensors,
                                               std::shared_ptr<comm::Communicator> group,
                                               Options options, CountedPass counted_pass);

  // Whether backward passes exchange gradients at their end, or add to what is there.
  void set_exchange(bool on);
  bool exchange() const { return exchange_; }

  // Backward of a loss that is a sum over `count` samples: the exchange divides the summed
  // gradients by the samples of all ranks, and of all passes since the last exchange, and not by
  // the number of ranks. All ranks do this in a step, or none; a rank without samples with an
  // undefined loss.
  void backward(const at::Tensor& loss_sum, std::int64_t count);

  // Of the last exchange that ended a backward().
  const StepTotals& totals() const { return loss_.totals(); }

  std::size_t num_buckets() const { return buckets_.size(); }
  std::int64_t num_exchanges() const { return num_exchanges_; }

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    std::unique_ptr<data_parallel::GradientHook> hook;
    std::size_t bucket = 0;
    at::Tensor view;      // of its bucket's memory, where that has any
    at::Tensor stand_in;  // zeros, where this rank has no gradient to add
    bool ready = false;   // in this backward pass
    bool used = false;    // in any pass since the last exchange
    // The gradient as it was handed out: zeroing it makes its version another.
    c10::weak_intrusive_ptr<c10::TensorImpl> handed_out{c10::intrusive_ptr<c10::TensorImpl>()};
    std::int64_t version = 0;
  };
  struct Bucket {
    GradientBucket content;
    std::vector<std::size_t> members;  // slots
    std::size_t pending = 0;
    comm::Work work;
    std::function<void()> complete;  // of a hook
  };

  GradientReducer(Tensors tensors, std::shared_ptr<comm::Communicator> group, Options options,
                  CountedPass counted_pass);

  void install_hooks();
  void on_gradient(std::size_t index, const at::Tensor& arrived);
  void check_gradient(const Slot& slot) const;
  void check_model() const;
  void check_usable() const;
  void check_zeroed() const;
  bool is_counted_pass() const { return counted_pass_->load() == this; }
  bool divides_by_count() const { return loss_.any(); }
  c10::Device device() const;

  // gradient_exchange.cpp
  void build_buckets(const std::vector<std::size_t>& order);
  void begin();
  void finish();
  bool needs_memory(const at::Tensor& parameter) const;
  void place(Slot& slot);
  void launch_ready();
  void launch(Bucket& bucket);
  std::vector<at::Tensor> memory_of(const Bucket& bucket) const;
  bool divided_in_flight() const;
  void refuse_unused(const std::vector<std::size_t>& unused);
  at::Tensor exchange_usage();
  void complete_buckets();
  void hand_out(const std::vector<std::size_t>& without_gradient, const at::Tensor& used_by);
  void learn_order(bool had_gradients);

  std::shared_ptr<comm::Communicator> group_;
  Options options_;
  CountedPass counted_pass_;
  std::vector<NamedTensor> frozen_;
  std::vector<NamedTensor> buffers_;
  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::size_t next_bucket_ = 0;           // to leave
  std::vector<std::size_t> ready_order_;  // of this pass
  bool exchange_ = true;
  bool in_backward_ = false;          // a gradient has come in this pass
  bool has_plain_gradients_ = false;  // of a caller's own backward(), since the last exchange
  bool broken_ = false;               // a backward() here ended in an exception
  bool order_known_ = false;
  std::int64_t num_exchanges_ = 0;
  data_parallel::CountedLoss loss_;  // of backward() since the last exchange
};

}  // namespace lockstep::replicate

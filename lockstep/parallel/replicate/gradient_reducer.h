// Sums gradients over ranks while backward computes the remaining ones.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/parallel/data_parallel/gradient_exchange.h>
#include <lockstep/parallel/replicate/options.h>

namespace lockstep::replicate {

using data_parallel::CountedPass;
using data_parallel::StepTotals;

// It hooks into the gradient accumulator of each parameter. A bucket of gradients is sent when its
// last gradient is ready and the buckets before it have been sent, so that all ranks send the same
// ones in the same order. In the first step that is the reverse order of registration; from then on
// it is the order in which gradients became ready on the first rank that had any. On the CPU
// gradients are summed where autograd put them; on other devices, and for a hook, they become views
// of a bucket's memory.
//
// Parameters may get other memory, types and devices, as by torch::load() and to(): hooks and
// buckets follow before the next pass.
//
// A rank without samples calls backward() with an undefined loss.
//
// Ownership: shares the parameters, keeps their accumulators alive.
class GradientReducer final : public data_parallel::GradientExchange {
 public:
  struct Tensors {
    std::vector<NamedTensor> trained;  // distinct parameters that require gradients
    std::vector<NamedTensor> frozen;   // distinct parameters that do not, and must not later
    std::vector<NamedTensor> buffers;  // broadcast from rank 0 after each exchange
    // Called when parameters got other memory, so that the caller can move them back into its own.
    std::function<void()> take_back = {};
  };
  static std::shared_ptr<GradientReducer> make(const data_parallel::RegisteredParameters& module,
                                               Tensors tensors,
                                               std::shared_ptr<comm::Communicator> group,
                                               Options options, CountedPass counted_pass);
  ~GradientReducer() override;

  // To be called before a step. UsageError that names a parameter whose gradient is this rank's
  // alone, because all passes since the last exchange were under no_sync(), or is not divided yet,
  // because further passes were to follow.
  void check_exchanged();
  // To be called before a step on gradients that were not exchanged since the last step. Ranks
  // compare them; UsageError on all of them where they differ. Every rank calls it.
  void check_same_gradients();
  // The caller has written to the parameters, on all ranks alike.
  void parameters_written();

 private:
  // Shows at no cost that a parameter was written to: its version, which writes through data() do
  // not change, and on the CPU its first bytes.
  struct Glimpse {
    std::uint32_t version = 0;
    std::uint64_t first_bytes = 0;
    bool operator==(const Glimpse&) const = default;
  };
  // A parameter, and its memory and type when it was last looked at. The weak reference keeps the
  // address from being used again.
  struct Placed {
    std::string name;
    at::Tensor parameter;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
    at::ScalarType type = at::kFloat;

    Placed(std::string its_name, at::Tensor tensor);
    bool has_moved() const;
    void note_place();
  };
  struct Slot : Placed {
    using Placed::Placed;
    std::unique_ptr<intercept::GradientHook> hook;
    std::size_t bucket = 0;
    at::Tensor view;      // of its bucket's memory, if the bucket has any
    at::Tensor stand_in;  // zeros, where this rank has no gradient to add
    at::Tensor sums;      // of earlier passes of the step, while another one runs
    bool ready = false;   // in this backward pass
    bool used = false;    // in any pass since the last exchange
    Glimpse before;       // the parameter at the first of those passes
    // The gradient as the optimizer got it: zeroing it changes its version.
    c10::weak_intrusive_ptr<c10::TensorImpl> handed_out{c10::intrusive_ptr<c10::TensorImpl>()};
    std::int64_t version = 0;
  };
  struct Bucket {
    GradientBucket content;
    std::vector<std::size_t> members;  // slots
    std::size_t pending = 0;
    comm::Work work;
    std::function<void()> complete;  // from a hook
  };

  GradientReducer(const data_parallel::RegisteredParameters& module, Tensors tensors,
                  std::shared_ptr<comm::Communicator> group, Options options,
                  CountedPass counted_pass);

  void on_gradient(std::size_t index, const at::Tensor& arrived) override;
  void check_parameters() override;
  void check_zeroed() const override;
  void set_sums_aside() override;
  void forget_dropped() override;
  void follow_moved();
  static Glimpse glimpse(const at::Tensor& parameter);
  static void take_out_of_bucket(Slot& slot) noexcept;

  // gradient_buckets.cpp
  void build_buckets(const std::vector<std::size_t>& order);
  void finish() override;
  bool needs_memory(std::span<const std::size_t> members) const;
  void place(Slot& slot);
  static void note_handed_out(Slot& slot);
  void launch_ready();
  void launch(Bucket& bucket);
  std::vector<at::Tensor> memory_of(const Bucket& bucket) const;
  bool divided_in_flight() const;
  void refuse_unused(const std::vector<std::size_t>& unused);
  at::Tensor exchange_usage();
  bool were_moved_anywhere(const at::Tensor& used_by);
  void compare_parameters();
  void complete_buckets();
  void add_earlier_passes();
  void hand_out(const std::vector<std::size_t>& without_gradient, const at::Tensor& used_by);
  void learn_order(bool had_gradients);

  Options options_;
  std::function<void()> take_back_;
  bool moved_ = false;   // whether parameters got other memory since the last exchange
  at::Tensor moved_on_;  // on how many ranks they did, once telling_moved_ is complete
  comm::Work telling_moved_;
  bool sums_are_aside_ = false;  // those of the step's earlier passes, in Slot::sums
  bool unexchanged_ = false;     // whether there are gradients of passes that others had to follow
  std::vector<Placed> frozen_;
  std::vector<NamedTensor> buffers_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::size_t next_bucket_ = 0;           // the next one to send
  std::vector<std::size_t> ready_order_;  // of this pass
  bool order_known_ = false;
};

}  // namespace lockstep::replicate

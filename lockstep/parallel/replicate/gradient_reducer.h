// Sums gradients over ranks while backward still computes the rest of them.
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

// Hooks into the gradient accumulator of each parameter. A bucket of gradients leaves when its last
// one is ready and those before it have left, so that all ranks send the same ones in the same
// order. The order is that of registration, backwards, in the first step, and from then on the one
// in which gradients became ready on the first rank that had any. On the CPU gradients are summed
// where autograd put them; on other devices, and for a hook, they become views of a bucket's
// memory.
//
// Parameters may be given other memory, types and devices, as torch::load() and to() do: before the
// next pass the hooks and buckets follow them.
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
    // Called where parameters were given other memory, by whoever wants them back in theirs.
    std::function<void()> take_back = {};
  };
  static std::shared_ptr<GradientReducer> make(const data_parallel::RegisteredParameters& module,
                                               Tensors tensors,
                                               std::shared_ptr<comm::Communicator> group,
                                               Options options, CountedPass counted_pass);
  ~GradientReducer() override;

  // UsageError that names a parameter whose gradient is this rank's alone, as the passes since the
  // last exchange were under no_sync(): before a step.
  void check_exchanged();
  // The caller has written to the parameters, on all ranks alike.
  void parameters_written();

  std::size_t num_buckets() const { return buckets_.size(); }

 private:
  // What shows, at no cost, that a parameter was written to: its version, which writes through
  // data() leave as it is, and on the CPU the first of its bytes.
  struct Glimpse {
    std::uint32_t version = 0;
    std::uint64_t first_bytes = 0;
    bool operator==(const Glimpse&) const = default;
  };
  struct Slot {
    std::string name;
    at::Tensor parameter;
    // The parameter's memory and type when it was looked at last. Held weakly, so that no other
    // memory comes to have its address.
    c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
    at::ScalarType type = at::kFloat;
    std::unique_ptr<intercept::GradientHook> hook;
    std::size_t bucket = 0;
    at::Tensor view;      // of its bucket's memory, where that has any
    at::Tensor stand_in;  // zeros, where this rank has no gradient to add
    bool ready = false;   // in this backward pass
    bool used = false;    // in any pass since the last exchange
    Glimpse before;       // of the parameter, at the first of those passes
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

  GradientReducer(const data_parallel::RegisteredParameters& module, Tensors tensors,
                  std::shared_ptr<comm::Communicator> group, Options options,
                  CountedPass counted_pass);

  void on_gradient(std::size_t index, const at::Tensor& arrived) override;
  void check_parameters() override;
  void check_zeroed() const override;
  void follow_moved();
  static Glimpse glimpse(const at::Tensor& parameter);
  static bool has_moved(const Slot& slot);
  static void note_place(Slot& slot);
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
  void hand_out(const std::vector<std::size_t>& without_gradient, const at::Tensor& used_by);
  void learn_order(bool had_gradients);

  Options options_;
  std::function<void()> take_back_;
  bool moved_ = false;   // parameters were, since the last exchange
  at::Tensor moved_on_;  // how many ranks said so, once telling_moved_ is over
  comm::Work telling_moved_;
  bool unexchanged_ = false;  // gradients are there of passes under no_sync()
  std::vector<NamedTensor> frozen_;
  std::vector<NamedTensor> buffers_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::size_t next_bucket_ = 0;           // to leave
  std::vector<std::size_t> ready_order_;  // of this pass
  bool order_known_ = false;
};

}  // namespace lockstep::replicate

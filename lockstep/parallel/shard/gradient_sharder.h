// Sums gradients over ranks, each rank's part of them, while backward still computes the rest.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/parallel/data_parallel/gradient_exchange.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/options.h>
#include <lockstep/parallel/shard/parameter_gatherer.h>
#include <lockstep/parallel/shard/sharded_optimizer.h>

namespace lockstep::shard {

// Stand-ins for gradients: .grad() of a parameter has one while the gradient itself lies in parts
// on the ranks. It is a tensor of the parameter's shape without memory. It says that there is a
// gradient: dropping it from .grad() drops the gradient, zeroing it zeroes it. Any other operator
// on it, as an optimizer over model->parameters() would call, throws a UsageError that says what to
// do instead.
//
// Threading: as LibTorch's operators.
class AbsentGradients final : public intercept::Owner,
                              public std::enable_shared_from_this<AbsentGradients> {
 public:
  static std::shared_ptr<AbsentGradients> make(const std::vector<NamedTensor>& parameters);

  void put(std::size_t index, const at::Tensor& parameter) const;
  bool is_in(std::size_t index, const at::Tensor& parameter) const;

  // Whether it was zeroed since put() or the last time this was asked to forget.
  bool was_zeroed(std::size_t index) const { return entries_[index].zeroed; }
  void forget_zeroing(std::size_t index) { entries_[index].zeroed = false; }

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;

 private:
  struct Entry {
    std::string name;
    at::Tensor stand_in;
    bool zeroed = false;
  };

  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> by_memory_;
};

// Hooks into the gradient accumulator of each trained parameter. What has come for a unit is
// collected in one memory, which leaves when the last one has come and the units before it have
// left, so that all ranks send the same ones in the same order: that of the model, backwards, in
// the first step, and from then on the one in which the first rank's were complete. A parameter
// without a gradient adds nothing; one that no rank has a gradient for gets none.
//
// Every rank computes in a backward(loss_sum, count): other ranks' gathers need it.
//
// Ownership: not the units and the gatherer, which outlive it; shares the parameters.
class GradientSharder final : public data_parallel::GradientExchange {
 public:
  struct Model {
    std::span<const std::unique_ptr<FlatUnit>> units;
    ParameterGatherer* gatherer;
    std::vector<NamedTensor> buffers;  // broadcast from rank 0 after each exchange
    bool quantize_gradients = false;
    comm::NodeGroups nodes = {};  // that they are summed in first, where they are quantized
  };
  static std::shared_ptr<GradientSharder> make(const data_parallel::RegisteredParameters& module,
                                               Model model, Groups groups,
                                               data_parallel::CountedPass counted_pass);
  ~GradientSharder() override;

  // This rank's part of a parameter's gradient, as the optimizer wants it; undefined where it has
  // none. UsageError where it has yet to be exchanged.
  at::Tensor piece(std::size_t unit, std::size_t member) const;
  // Leaves these gradients undefined.
  void drop_gradients(std::span<const SteppedModel::Member> members);

  std::int64_t gradient_bytes() const;
  // Whether they lie in the host's memory, and the parameters do not.
  bool sums_on_host() const { return sums_on_host_; }
  BufferPool::Usage buffer_usage() const { return buffers_of_gradients_.usage(); }

 private:
  struct Slot {
    std::size_t unit;
    std::size_t member;
    std::string name;
    at::Tensor parameter;
    std::unique_ptr<intercept::GradientHook> hook;
    bool ready = false;  // in this backward pass
    bool used = false;   // in any pass since the last exchange
    bool adds = false;   // to what was exchanged before
  };
  struct UnitState {
    std::vector<std::size_t> slots;  // of its members
    std::size_t pending = 0;
    at::Tensor collected;  // [num_padded] of this rank, until it has left
    at::Tensor sums;       // [part_size], from the first exchange on
    at::Tensor incoming;   // where it does not come as it stays, or is added to what was there
    comm::Work reducing;
    std::optional<comm::QuantizedReduceScatter> quantized;  // instead of it
    std::optional<comm::Work> over_replicas;                // once it has started
  };

  GradientSharder(const data_parallel::RegisteredParameters& module, Model model, Groups groups,
                  data_parallel::CountedPass counted_pass);

  void on_gradient(std::size_t index, const at::Tensor& arrived) override;
  void check_parameters() override;
  void check_zeroed() const override;
  void check_not_counted() const;

  // gradient_parts.cpp
  void finish() override;
  void collect(Slot& slot, const at::Tensor& gradient);
  void launch_ready();
  void launch(std::size_t unit);
  void launch_quantized(std::size_t unit, const at::Tensor& output);
  bool divides_in_flight(const FlatUnit& unit) const;
  bool oldest_has_come();
  bool advance(std::size_t unit);
  void add_replicas(std::size_t unit);
  void settle_oldest();
  void settle(std::size_t unit);
  void keep_incoming(UnitState& state, const FlatUnit& unit);
  void divide_sums();
  void hand_out(const at::Tensor& used_by);
  void compare_replicas();

  Model model_;
  Groups groups_;
  BufferPool buffers_of_gradients_;
  std::shared_ptr<AbsentGradients> absent_;
  std::vector<Slot> slots_;
  std::vector<UnitState> states_;         // of every unit, trained or not
  std::vector<std::size_t> order_;        // units in the order in which they leave
  std::vector<std::size_t> ready_order_;  // of this pass
  std::size_t next_ = 0;                  // in order_: to leave
  std::deque<std::size_t> in_flight_;
  at::Tensor num_ranks_;       // [1] of float64
  bool sums_on_host_ = false;  // though the parameters are not
  bool patient_ = true;        // sums have come when they were waited for, so far
  bool order_known_ = false;
};

}  // namespace lockstep::shard

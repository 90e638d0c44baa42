// Sums gradients over ranks, each rank's part of them, while backward still computes the rest.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/gradient_hook.h>
#include <lockstep/parallel/shard/absent_gradients.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/groups.h>
#include <lockstep/parallel/shard/parameter_gatherer.h>

namespace lockstep::shard {

// Hooks into the gradient accumulator of each trained parameter. What has come for a unit is
// collected in one memory, which leaves when the last one has come and the units before it have
// left, so that all ranks send the same ones in the same order: that of the model, backwards, in
// the first step, and from then on the one in which the first rank's were complete. A parameter
// without a gradient adds nothing; one that no rank has a gradient for gets none.
//
// Passes come in two kinds, as for data parallelism without shards: the caller's own
// loss.backward(), at whose end the mean over the ranks is taken, and backward(loss_sum, count).
//
// Ownership: not the units and the gatherer, which outlive it; shares the parameters. Its hooks do
// nothing once it is gone. Threading: backward passes one at a time, on any threads of autograd.
// Failure: UsageError and CommError come out of the backward() during which they happen.
class GradientSharder : public std::enable_shared_from_this<GradientSharder> {
 public:
  struct Model {
    std::span<const std::unique_ptr<FlatUnit>> units;
    ParameterGatherer* gatherer;
    std::vector<NamedTensor> buffers;  // broadcast from rank 0 after each exchange
    bool quantize_gradients = false;
    comm::NodeGroups nodes = {};  // that they are summed in first, where they are quantized
  };
  static std::shared_ptr<GradientSharder> make(Model model, Groups groups,
                                               data_parallel::CountedPass counted_pass);

  // Whether backward passes exchange gradients at their end, or add to what is on the rank.
  void set_exchange(bool on);
  bool exchange() const { return exchange_; }

  // As replicate::GradientReducer's, but that every rank computes: other ranks' gathers need it.
  void backward(const at::Tensor& loss_sum, std::int64_t count);

  // Of the last exchange that ended a backward().
  const data_parallel::StepTotals& totals() const { return loss_.totals(); }

  // This rank's part of a parameter's gradient, as the optimizer wants it; undefined where it has
  // none. UsageError where it has yet to be exchanged.
  at::Tensor piece(std::size_t unit, std::size_t member) const;
  // Leaves every gradient undefined.
  void drop_gradients();

  // What would otherwise train on each rank by itself, unnoticed: UsageError.
  void check_model() const;

  std::int64_t num_exchanges() const { return num_exchanges_; }
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
    std::unique_ptr<data_parallel::GradientHook> hook;
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

  GradientSharder(Model model, Groups groups, data_parallel::CountedPass counted_pass);
  void install_hooks();

  void on_gradient(std::size_t index, const at::Tensor& arrived);
  void check_gradient(const Slot& slot, const at::Tensor& gradient) const;
  void check_usable() const;
  void check_zeroed() const;
  void check_not_counted() const;
  bool is_counted_pass() const { return counted_pass_->load() == this; }
  c10::Device device() const { return slots_.front().parameter.device(); }

  // gradient_parts.cpp
  void begin();
  void finish();
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
  void hand_out(const at::Tensor& used_by);

  Model model_;
  Groups groups_;
  data_parallel::CountedPass counted_pass_;
  BufferPool buffers_of_gradients_;
  std::shared_ptr<AbsentGradients> absent_;
  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<UnitState> states_;         // of every unit, trained or not
  std::vector<std::size_t> order_;        // units in the order in which they leave
  std::vector<std::size_t> ready_order_;  // of this pass
  std::size_t next_ = 0;                  // in order_: to leave
  std::deque<std::size_t> in_flight_;
  at::Tensor num_ranks_;       // [1] of float64
  bool sums_on_host_ = false;  // though the parameters are not
  bool exchange_ = true;
  bool in_backward_ = false;          // a gradient has come in this pass
  bool has_plain_gradients_ = false;  // of a caller's own backward(), since the last zeroing
  bool broken_ = false;               // a backward() here ended in an exception
  bool patient_ = true;               // sums have come when they were waited for, so far
  bool order_known_ = false;
  std::int64_t num_exchanges_ = 0;
  data_parallel::CountedLoss loss_;
};

}  // namespace lockstep::shard

// How much memory a rank needs while a model trains, for each strategy and any number of ranks.
#pragma once

#include <cstdint>

#include <lockstep/optim/options/optimizer_options.h>
#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/plan/model_sizes.h>
#include <lockstep/plan/precision.h>

namespace lockstep::plan {

// The data that is kept in the host's memory in place of the device's.
enum class Offload : std::uint8_t {
  none,
  optimizer,                 // its state, with the weights that it steps on and their gradients
  optimizer_and_parameters,  // and the parts of parameters that are cut
};

// How many copies of a rank's share there are: one for a checkpoint that is written while training
// goes on; and for copies in the ranks' memory two at a time, each of its own share and a
// neighbour's.
inline constexpr int kSharesOfSave = 1;
constexpr int shares_of_peer_copies(int num_ranks) { return num_ranks == 1 ? 2 : 4; }

// Whether a strategy can offload this: only data that it cuts can be offloaded.
bool can_offload(ShardingStrategy strategy, Offload offload);

struct MemoryOptions {
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  int num_ranks = 1;
  int ranks_per_copy = 0;  // of HYBRID_SHARD; 0: all of them
  // The precision in which operators compute on a GPU, and in which ranks send each other
  // parameters that are cut.
  Precision precision = Precision::fp32;
  Offload offload = Offload::none;
  // Weights that the optimizer steps on, and their gradients, in the 16 bits of `precision`; where
  // gradients are cut.
  bool narrow_masters = false;
  bool narrow_states = false;  // the optimizer's state, too
  double state_bytes = 8;      // the optimizer's for each parameter, in fp32: Adam 8, momentum 4
  // How much of a parameter its step sees; for an optimizer of whole matrices also the bytes of
  // state of each of their elements.
  optim::StepKind step_kind = optim::StepKind::elementwise;
  double matrix_state_bytes = 0;
  // What a checkpoint has of the state for each parameter, where that is not the same.
  std::optional<double> saved_state_bytes = {};
  std::int64_t max_live_units = 2;  // shard::Options
  std::int64_t accumulation = 1;    // micro-batches of a step
  ExchangeGradients exchange_gradients = ExchangeGradients::automatic;
  int ranks_per_node = 0;  // that keep a copy among them (hpZ); 0: none do
  // How often the host's memory holds a copy of a rank's share of the checkpoint. All ranks have
  // equal shares of it, whatever the strategy.
  int copied_shares = 0;
  Device device = Device::cpu;
};

// Bytes on each rank. Only tensors are counted: neither LibTorch's libraries, nor a GPU's context,
// nor an allocator's reserve.
struct MemoryEstimate {
  // The most that each takes in a step.
  std::int64_t weights = 0;  // with the copies that autocast makes
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;  // with the fp32 weights of a 16-bit model
  std::int64_t gathered = 0;   // units of parameters, beyond a rank's parts
  std::int64_t gradients_on_their_way = 0;
  std::int64_t activations = 0;
  std::int64_t step =
      0;  // directions and matrices of the optimizer's step, when activations are gone
  std::int64_t buffers = 0;
  std::int64_t copies = 0;  // of what checkpoints hold, where the device is the host

  // The most at once: less than their sum where activations go while gradients come.
  std::int64_t peak = 0;

  // Bytes of the host's memory where the device has its own: offloaded data, and copies of shares
  // of the checkpoint.
  std::int64_t host_weights = 0;
  std::int64_t host_optimizer = 0;  // with what its step takes there
  std::int64_t host_copies = 0;

  std::int64_t host() const { return host_weights + host_optimizer + host_copies; }
};

// UsageError, with the numbers, for options that make no sense.
MemoryEstimate estimate_memory(const ModelSizes& model, const StepTrace& trace,
                               const MemoryOptions& options);

}  // namespace lockstep::plan

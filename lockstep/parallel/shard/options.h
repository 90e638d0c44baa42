// The options of a sharded model: what is cut, offload to the host, mixed precision, ZeRO++; and
// the groups of ranks that it talks to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

// The part of a sharded model's state that waits in the host's memory instead of the device's. Its
// update runs on the host's cores; only what operators need comes to the device.
struct CPUOffload {
  // The optimizer's state, the part that it steps on, and that part's gradient.
  bool offload_optimizer = false;
  // The copy of its parameters that a rank sends, too. Needs offload_optimizer, and sharded
  // parameters.
  bool offload_params = false;
};

// UsageError where they do not go together.
void check(const CPUOffload& offload);

// Where the product of two 16-bit numbers is slow, 16 bits save bytes between ranks alone.
enum class Compute : std::uint8_t {
  where_fast,      // in 16 bits on GPUs, in the module's own type on CPUs
  in_param_dtype,  // in 16 bits everywhere
};

// The types of numbers that a sharded model computes in, sends and keeps. Parameters, gradients and
// buffers of type Float become these; where one is not given, it stays as it is, as batch norms do.
struct MixedPrecision {
  // The type in which ranks send each other parameters, and in which operators compute.
  std::optional<c10::ScalarType> param_dtype = {};
  // The type in which ranks send each other gradients. They are added up as floats and kept as
  // such.
  std::optional<c10::ScalarType> reduce_dtype = {};
  // The type of masks, tables and the like, where operators compute in 16 bits; not of batch norms.
  std::optional<c10::ScalarType> buffer_dtype = {};
  Compute compute = Compute::where_fast;
  // The type of the weights that the optimizer steps on, and of the gradients that it gets. Half or
  // BFloat16, and then param_dtype, too: there are no weights in Float.
  std::optional<c10::ScalarType> master_dtype = {};
  // How the optimizer writes such weights.
  optim::SixteenBits master_rounding = {};
};

// UsageError for a type that is neither Float, Half nor BFloat16, and for types that do not go
// together.
void check(const MixedPrecision& precision);

// Their running statistics need all their digits, and their kernels want parameters of that type.
bool is_batch_norm(const torch::nn::Module& module);
KeepType parameters_of_batch_norms(const torch::nn::Module& module);

// Whether operators on this device compute in param_dtype.
bool computes_in_param_dtype(const MixedPrecision& precision, c10::Device device);

// ZeRO++: fewer bytes between nodes, for some of the numbers' digits.
struct ZeroPlusPlusConfig {
  // Parameters are gathered as int8, in blocks with a scale each (qwZ).
  bool quantize_weights = false;
  // Gradients are summed from int4, in blocks with a scale each (qgZ).
  bool quantize_gradients = false;
  // So many consecutive ranks make a node, and keep a copy of the model among them from the first
  // gather after a step to the next step (hpZ): gathers in between do not leave the node, and
  // quantized gradients are summed inside of it first. 0 or 1: no nodes.
  int hierarchical_partition = 0;

  bool has_nodes() const { return hierarchical_partition > 1; }
};

// UsageError where a parameter's type cannot be quantized.
void check_quantizes(const ZeroPlusPlusConfig& config, const std::vector<NamedTensor>& parameters);

// The state that is cut among the ranks beside the optimizer's.
enum class Cut {
  gradients,                 // ZeRO-2
  gradients_and_parameters,  // ZeRO-3
};

struct Options {
  Cut cut = Cut::gradients_and_parameters;
  UnitPolicy units = {};
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  ZeroPlusPlusConfig zero_plus_plus = {};
  // Units whose parameters are on a rank at once, the next one's included: the bound on what a rank
  // holds beyond its part. More of them spare gathers where a model goes back and forth.
  std::size_t max_live_units = 2;
  // Makes buffers (running statistics and the like) those of rank 0 after each backward pass.
  bool broadcast_buffers = true;
  // Fills parameters that are let go with NaN: finds code that reads them behind LibTorch's back.
  bool scrub_freed_memory = false;
};

// Two groups over the ranks that cut a model among them: gathers come when operators need them,
// reductions when gradients are ready, and neither order says anything about the other.
struct Groups {
  // Every rank that has samples of its own: counts, what was used, buffers.
  std::shared_ptr<comm::Communicator> all;
  // Ranks that hold the parts of one copy of the model.
  std::shared_ptr<comm::Communicator> gather;
  std::shared_ptr<comm::Communicator> reduce;
  // Ranks that hold the same part of each copy; null where there is one copy.
  std::shared_ptr<comm::Communicator> replicas;
};

// One copy, cut among all ranks of a group. Every rank calls it.
Groups shard_over(const std::shared_ptr<comm::Communicator>& all);
// As many copies as `replicas` has ranks.
Groups shard_over(const std::shared_ptr<comm::Communicator>& all,
                  const std::shared_ptr<comm::Communicator>& shard,
                  const std::shared_ptr<comm::Communicator>& replicas);

// The ranks that gather, and those that reduce, divided into the nodes of ZeRO++; null where there
// are none.
struct Nodes {
  std::shared_ptr<comm::Communicator> gather;  // the ranks of this one's node
  comm::NodeGroups reduce;
};

// Every rank calls it. UsageError, with the numbers, where ranks cannot be divided so.
Nodes make_nodes(const ZeroPlusPlusConfig& config, comm::Communicator& gather,
                 comm::Communicator& reduce);

}  // namespace lockstep::shard

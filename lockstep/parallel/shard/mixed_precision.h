// In which types of numbers a sharded model computes and talks.
#pragma once

#include <cstdint>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

// Where the product of two 16-bit numbers is slow, 16 bits save bytes between ranks alone.
enum class Compute : std::uint8_t {
  where_fast,      // in 16 bits on GPUs, in the module's own type on CPUs
  in_param_dtype,  // in 16 bits everywhere
};

// Parameters, gradients and buffers of type Float become these; where one is not given, it stays as
// it is, as batch norms do. The part of a parameter that a rank's optimizer steps on is always of
// its own type.
struct MixedPrecision {
  // What ranks send each other of parameters, and what operators compute with.
  std::optional<c10::ScalarType> param_dtype = {};
  // What ranks send each other of gradients. They are added up as floats and kept as such.
  std::optional<c10::ScalarType> reduce_dtype = {};
  // Of masks, tables and the like, where operators compute in 16 bits; not of batch norms.
  std::optional<c10::ScalarType> buffer_dtype = {};
  Compute compute = Compute::where_fast;
};

// UsageError for a type that is neither Float, Half nor BFloat16.
void check(const MixedPrecision& precision);

// Their running statistics need all their digits, and their kernels want parameters of that type.
bool is_batch_norm(const torch::nn::Module& module);
KeepType parameters_of_batch_norms(const torch::nn::Module& module);

// Whether operators on this device compute in param_dtype.
bool computes_in_param_dtype(const MixedPrecision& precision, c10::Device device);

}  // namespace lockstep::shard

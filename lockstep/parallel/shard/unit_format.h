// In which types and places a unit's numbers are.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/shard/cpu_offload.h>
#include <lockstep/parallel/shard/mixed_precision.h>

namespace lockstep::shard {

struct UnitFormat {
  at::ScalarType own;       // of the part that the optimizer steps on, and of its gradient
  at::ScalarType gathered;  // of the parameters, while they are there
  at::ScalarType sent;      // of parameters, from rank to rank
  at::ScalarType reduced;   // of gradients, from rank to rank
  c10::Device device;       // where operators use them
  c10::Device stepped_on;   // where the optimizer's part is, and its gradient
  c10::Device sent_from;    // where what is sent waits to be
  bool quantized = false;   // parameters go from rank to rank as int8

  // As the parameters are.
  static UnitFormat of(at::ScalarType own, c10::Device device);
  // Types other than Float stay what they are.
  static UnitFormat of(at::ScalarType own, c10::Device device, const MixedPrecision& precision,
                       const CPUOffload& offload);

  // Whether the optimizer can step on gathered parameters themselves.
  bool is_one() const { return sent == own && gathered == own && stepped_on == device; }
  // Whether operators compute in another type than the optimizer.
  bool computes_in_other_type() const { return gathered != own; }
};

}  // namespace lockstep::shard

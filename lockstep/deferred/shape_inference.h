// What an operator would return, from a run on LibTorch's meta device, where tensors have shapes
// and no elements.
#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lockstep::deferred {

struct InferredShapes {
  enum class Outcome : std::uint8_t {
    known,
    unknown,  // LibTorch has no way to tell for this operator
    failed,   // the arguments do not go together, or it was tried and threw something else
  };
  Outcome outcome = Outcome::unknown;
  torch::jit::Stack arguments;  // as the operator left them: outputs may have other shapes
  torch::jit::Stack results;
};

InferredShapes infer_shapes(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

}  // namespace lockstep::deferred

// Properties of an operator, found from its schema and its kernels, and the shapes of its results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lockstep::deferred {

// The operator is composed of others, which do all of its work on elements of tensors: running it
// runs them.
bool decomposes(const c10::OperatorHandle& op);
// The same for an operator that gets no deferred tensor and may make some. An operator that
// allocates memory and writes there itself is not composed of factories.
bool is_made_of_factories(const c10::OperatorHandle& op);

// It returns views, or changes a tensor's shape or names in place.
bool touches_no_element(const c10::OperatorHandle& op);

// It writes to arguments, and returns only these or nothing. False if it may give them other
// memory.
bool only_writes_arguments(const c10::OperatorHandle& op);
// It writes to no argument and returns new tensors, whose shapes follow from the arguments' shapes.
bool only_returns_new_tensors(const c10::OperatorHandle& op);

bool is_written(const c10::OperatorHandle& op, std::size_t argument);
// The argument is an output, and is resized to the shape of the result.
bool is_out(const c10::OperatorHandle& op, std::size_t argument);
// Every element of this written argument gets a value that does not depend on its old one.
bool is_overwritten(const c10::OperatorHandle& op, std::size_t argument);

// It draws from a generator.
bool is_random(const c10::OperatorHandle& op);
// It is random, writes in place and has a generator as an argument; how many numbers it draws
// follows from the tensor's shape and the other arguments, and not from the numbers.
bool draws_by_shape(const c10::OperatorHandle& op);
std::optional<std::size_t> generator_argument(const c10::OperatorHandle& op);

// The results that an operator would return, found by running it on LibTorch's meta device, where
// tensors have shapes and no elements.
struct InferredShapes {
  enum class Outcome : std::uint8_t {
    known,
    unknown,  // LibTorch cannot infer shapes for this operator
    failed,   // it threw, for example because the arguments do not fit together
  };
  Outcome outcome = Outcome::unknown;
  torch::jit::Stack arguments;  // after the operator: outputs may have other shapes
  torch::jit::Stack results;
};

InferredShapes infer_shapes(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

}  // namespace lockstep::deferred

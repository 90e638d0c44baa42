// What can be told of an operator from its schema and its kernels.
#pragma once

#include <cstddef>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>

namespace lockstep::deferred {

// Made of other operators, which do all that it does to elements of tensors: running it runs them.
bool decomposes(const c10::OperatorHandle& op);
// The same for one that gets no deferred tensor and may make some: what takes memory and writes
// there by itself is not among them.
bool is_made_of_factories(const c10::OperatorHandle& op);

// Views, and what changes a tensor's shape or names where it stands.
bool touches_no_element(const c10::OperatorHandle& op);

// Writes to arguments, and returns these alone or nothing. Not where it may give them another
// memory.
bool only_writes_arguments(const c10::OperatorHandle& op);
// Writes to no argument and returns new tensors, of shapes that follow from those of the arguments.
bool only_returns_new_tensors(const c10::OperatorHandle& op);

bool is_written(const c10::OperatorHandle& op, std::size_t argument);
// Takes the shape of the result, where it had another.
bool is_out(const c10::OperatorHandle& op, std::size_t argument);
// Every element of this written argument gets a value that does not depend on the one it had.
bool is_overwritten(const c10::OperatorHandle& op, std::size_t argument);

// Draws from a generator.
bool is_random(const c10::OperatorHandle& op);
// Random, in place, with a generator as an argument, and takes as many numbers from it as follows
// from the tensor's shape and the other arguments, whatever the numbers are.
bool draws_by_shape(const c10::OperatorHandle& op);
std::optional<std::size_t> generator_argument(const c10::OperatorHandle& op);

}  // namespace lockstep::deferred

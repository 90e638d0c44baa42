// Random operators that are put off: the generator moves on at once, as if they had run.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <lockstep/deferred/record.h>

namespace lockstep::deferred {

// How many numbers an operator draws for a tensor is LibTorch's own affair, and differs between
// versions and machines. It is measured on small tensors, once for each operator, type, set of
// other arguments and place in a block of 64 elements, and never assumed: where what was measured
// does not grow evenly with the size, the operator runs once on a tensor that is thrown away.
//
// Threading: one at a time. Failure: what the operator throws, for arguments it does not take.
class RandomDraws {
 public:
  // Whether draw() can tell what the operator would leave the generator like.
  static bool can_draw(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);
  // The operator's generator as it is now, which then moves on.
  GeneratorState draw(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

 private:
  std::optional<std::uint64_t> num_draws(const c10::OperatorHandle& op,
                                         std::span<const c10::IValue> arguments);

  // The numbers drawn for the smallest tensor that was measured, and for every 64 elements more.
  struct Measured {
    std::uint64_t first = 0;
    std::uint64_t per_block = 0;
  };
  static std::optional<Measured> measure(const c10::OperatorHandle& op,
                                         std::span<const c10::IValue> arguments,
                                         std::int64_t remainder);

  std::unordered_map<std::string, std::optional<Measured>> measured_;
};

// The generator that an operator with these arguments draws from, and its state.
at::Generator generator_of(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);
GeneratorState state_of_generator(const c10::OperatorHandle& op,
                                  std::span<const c10::IValue> arguments);
// A generator of its own in that state: the program's is not touched.
at::Generator generator_in(const GeneratorState& state);

}  // namespace lockstep::deferred

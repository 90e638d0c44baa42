// Random operators that are deferred: the generator is advanced at once, as if they had run.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <lockstep/deferred/record.h>

namespace lockstep::deferred {

using TwisterState = at::mt19937_data_pod;

// Advances LibTorch's generator for the CPU by `draws` draws of 32 bits, without computing them.
void skip(TwisterState& state, std::uint64_t draws);

// How many draws lead from one state to the other; nothing if there are more than `most`.
std::optional<std::uint64_t> draws_between(const TwisterState& from, const TwisterState& to,
                                           std::uint64_t most);

// How many numbers an operator draws for a tensor differs between LibTorch's versions and machines.
// It is measured on small tensors, once for each operator, type, set of other arguments and
// remainder of the size by 64. If the measured numbers do not grow evenly with the size, the
// operator runs once on a tensor that is thrown away.
//
// Threading: one thread at a time. Failure: the operator's exception for invalid arguments.
class RandomDraws {
 public:
  // Whether draw() can compute the state in which the operator would leave the generator.
  static bool can_draw(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);
  // Returns the state of the operator's generator, and then advances it.
  GeneratorState draw(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

 private:
  std::optional<std::uint64_t> num_draws(const c10::OperatorHandle& op,
                                         std::span<const c10::IValue> arguments);

  // The numbers drawn for the smallest measured tensor, and for each further 64 elements.
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
// A new generator in that state. The program's own generator is not touched.
at::Generator generator_in(const GeneratorState& state);

}  // namespace lockstep::deferred

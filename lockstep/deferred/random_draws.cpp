#include <lockstep/deferred/random_draws.h>

#include <array>
#include <mutex>
#include <sstream>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/as_is.h>
#include <lockstep/deferred/mersenne_twister.h>
#include <lockstep/deferred/operator_traits.h>

namespace lockstep::deferred {

namespace {

// Kernels work in groups of 4 to 64 elements; within a group anything may happen.
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kSmallest = 4 * kBlock;
constexpr std::uint64_t kMostDraws = 1 << 16;

at::CPUGeneratorImpl& implementation(const at::Generator& generator) {
  return *generator.get<at::CPUGeneratorImpl>();
}

// Everything but the tensor and the generator, which may decide how many numbers are drawn.
std::string description(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments,
                        std::int64_t remainder) {
  std::ostringstream text;
  text << op.operator_name() << ' ' << arguments[0].toTensor().scalar_type() << ' ' << remainder;
  for (std::size_t i = 1; i < arguments.size(); ++i)
    if (!arguments[i].isGenerator()) text << ' ' << arguments[i];
  return text.str();
}

void run_on(const at::Tensor& tensor, const at::Generator& generator, const c10::OperatorHandle& op,
            std::span<const c10::IValue> arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = tensor;
  stack[*generator_argument(op)] = generator;
  op.callBoxed(&stack);
}

}  // namespace

bool RandomDraws::can_draw(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  if (!draws_by_shape(op)) return false;
  const at::Generator generator = generator_of(op, arguments);
  // A generator of the program's own kind has no state that we could know.
  return generator.device().is_cpu() && !generator.key_set().has(c10::DispatchKey::CustomRNGKeyId);
}

GeneratorState RandomDraws::draw(const c10::OperatorHandle& op,
                                 std::span<const c10::IValue> arguments) {
  const AsIs as_is;
  at::Generator generator = generator_of(op, arguments);
  GeneratorState before = state_of_generator(op, arguments);
  if (const auto draws = num_draws(op, arguments)) {
    const std::lock_guard lock(generator.mutex());
    auto engine = implementation(generator).engine();
    TwisterState state = engine.data();
    skip(state, *draws);
    engine.set_data(state);
    implementation(generator).set_engine(engine);
  } else {
    const at::Tensor& tensor = arguments[0].toTensor();
    run_on(
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false)),
        generator, op, arguments);
  }
  return before;
}

std::optional<std::uint64_t> RandomDraws::num_draws(const c10::OperatorHandle& op,
                                                    std::span<const c10::IValue> arguments) {
  const at::Tensor& tensor = arguments[0].toTensor();
  const std::int64_t numel = tensor.numel();
  if (!tensor.is_contiguous() || numel < kSmallest + kBlock) return std::nullopt;
  const std::int64_t remainder = numel % kBlock;
  const std::string key = description(op, arguments, remainder);
  auto found = measured_.find(key);
  if (found == measured_.end())
    found = measured_.emplace(key, measure(op, arguments, remainder)).first;
  if (!found->second) return std::nullopt;
  const auto blocks = static_cast<std::uint64_t>((numel - kSmallest - remainder) / kBlock);
  return found->second->first + blocks * found->second->per_block;
}

std::optional<RandomDraws::Measured> RandomDraws::measure(const c10::OperatorHandle& op,
                                                          std::span<const c10::IValue> arguments,
                                                          std::int64_t remainder) {
  constexpr std::array<std::uint64_t, 4> kBlocks = {0, 1, 2, 17};
  std::array<std::uint64_t, kBlocks.size()> draws{};
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    const at::Generator generator = at::detail::createCPUGenerator();
    auto& twister = implementation(generator);
    // Where normal numbers come in pairs, the second one waits here for the next call: whoever
    // takes it or leaves one draws a number that depends on more than the shape.
    twister.set_next_float_normal_sample(0.5F);
    twister.set_next_double_normal_sample(0.5);
    const TwisterState before = twister.engine().data();
    const auto numel = kSmallest + remainder + static_cast<std::int64_t>(kBlocks[i]) * kBlock;
    run_on(at::empty({numel}, arguments[0].toTensor().options().requires_grad(false)), generator,
           op, arguments);
    const auto drawn = draws_between(before, twister.engine().data(), kMostDraws);
    const bool left_alone =
        twister.next_float_normal_sample() == 0.5F && twister.next_double_normal_sample() == 0.5;
    if (!drawn || !left_alone) return std::nullopt;
    draws[i] = *drawn;
  }
  const std::uint64_t per_block = draws[1] - draws[0];
  for (std::size_t i = 0; i < kBlocks.size(); ++i)
    if (draws[i] != draws[0] + kBlocks[i] * per_block) return std::nullopt;
  return Measured{draws[0], per_block};
}

at::Generator generator_of(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  const c10::IValue& given = arguments[*generator_argument(op)];
  return given.isNone() ? at::detail::getDefaultCPUGenerator() : given.toGenerator();
}

GeneratorState state_of_generator(const c10::OperatorHandle& op,
                                  std::span<const c10::IValue> arguments) {
  const AsIs as_is;
  at::Generator generator = generator_of(op, arguments);
  const std::lock_guard lock(generator.mutex());
  return {*generator_argument(op), generator.get_state()};
}

at::Generator generator_in(const GeneratorState& state) {
  at::Generator generator = at::detail::createCPUGenerator();
  generator.set_state(state.bytes);
  return generator;
}

}  // namespace lockstep::deferred

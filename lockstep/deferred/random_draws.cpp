#include <lockstep/deferred/random_draws.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <sstream>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/factory_scope.h>
#include <lockstep/deferred/operator_traits.h>

namespace lockstep::deferred {

namespace {

// MT19937 by Matsumoto and Nishimura: a state of this many words gives as many numbers, and is then
// turned into the next state.
constexpr std::size_t kWords = 624;
constexpr std::size_t kDistance = 397;

std::uint32_t combine(std::uint32_t high, std::uint32_t low) {
  const std::uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
  return (mixed >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

// Three loops, none of which reads a word that it wrote fewer than 227 words before, so that the
// compiler can compute several words at once.
void next_block(std::array<std::uint32_t, kWords>& words) {
  constexpr std::size_t kRest = kWords - kDistance;
  for (std::size_t i = 0; i < kRest; ++i)
    words[i] = words[i + kDistance] ^ combine(words[i], words[i + 1]);
  for (std::size_t i = kRest; i < kWords - 1; ++i)
    words[i] = words[i - kRest] ^ combine(words[i], words[i + 1]);
  words[kWords - 1] = words[kDistance - 1] ^ combine(words[kWords - 1], words[0]);
}

bool same(const TwisterState& a, const TwisterState& b) {
  return a.next_ == b.next_ && a.left_ == b.left_ && a.state_ == b.state_;
}

}  // namespace

void skip(TwisterState& state, std::uint64_t draws) {
  // `left_` is one more than the numbers that are left in the block.
  const auto left = static_cast<std::uint64_t>(state.left_ - 1);
  if (draws <= left) {
    state.left_ -= static_cast<int>(draws);
    state.next_ += static_cast<std::uint32_t>(draws);
    return;
  }
  draws -= left;
  for (; draws > kWords; draws -= kWords) next_block(state.state_);
  next_block(state.state_);
  state.left_ = static_cast<int>(kWords - draws + 1);
  state.next_ = static_cast<std::uint32_t>(draws);
}

std::optional<std::uint64_t> draws_between(const TwisterState& from, const TwisterState& to,
                                           std::uint64_t most) {
  TwisterState state = from;
  std::uint64_t draws = 0;
  // The states have the same place in a block only every 624 draws.
  const std::uint64_t first = (to.next_ + kWords - from.next_) % kWords;
  for (std::uint64_t step = first; draws + step <= most; step = kWords) {
    skip(state, step);
    draws += step;
    if (same(state, to)) return draws;
  }
  return std::nullopt;
}

namespace {

// Kernels work in groups of 4 to 64 elements, and may draw in any order within a group.
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kSmallest = 4 * kBlock;
constexpr std::uint64_t kMostDraws = 1 << 16;

at::CPUGeneratorImpl& implementation(const at::Generator& generator) {
  return *generator.get<at::CPUGeneratorImpl>();
}

// All that may decide how many numbers are drawn, apart from the number of elements.
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
  // We do not know the state of a generator that the program defines itself.
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
    // Normal numbers may come in pairs; the second one is stored here for the next call. If an
    // operator takes or stores one, the number of its draws depends on more than the shape.
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

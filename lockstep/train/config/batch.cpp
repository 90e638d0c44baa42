#include <lockstep/train/config/batch.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr const char* kGlobal = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";

std::string ranks_text(std::int64_t world_size) {
  return world_size == 1 ? "1 rank" : fmt::format("{} ranks", world_size);
}

// "8 or 12": the multiples of `unit` on both sides of a number that is none.
std::string multiples_near(std::int64_t number, std::int64_t unit) {
  const std::int64_t below = number / unit * unit;
  return below == 0 ? fmt::format("{}", unit) : fmt::format("{} or {}", below, below + unit);
}

}  // namespace

std::string batch_contradiction(const BatchSection& asked) {
  const auto& [global, micro, accumulation] = asked;
  if (!global && !micro)
    return fmt::format("neither {} (samples of a step, on all ranks) nor {} (samples of one "
                       "forward pass, on one rank) is given: set at least one of them",
                       kGlobal, kMicro);
  if (!global) return "";
  const std::int64_t unit = micro.value_or(1) * accumulation.value_or(1);
  if (*global % unit == 0) return "";
  std::string given;
  if (micro) given = fmt::format("{} {}", kMicro, *micro);
  if (accumulation)
    given += fmt::format("{}{} {}", given.empty() ? "" : " × ", kAccumulation, *accumulation);
  return fmt::format("{} {} is no multiple of {}{}, so no number of ranks can train with it: make "
                     "it {}, or change the other",
                     kGlobal, *global, given,
                     micro && accumulation ? fmt::format(" = {}", unit) : "",
                     multiples_near(*global, unit));
}

Batch resolve_batch(const BatchSection& asked, std::int64_t world_size) {
  LOCKSTEP_CHECK(world_size >= 1, "{} ranks", world_size);
  if (const std::string wrong = batch_contradiction(asked); !wrong.empty()) throw UsageError(wrong);
  const auto& [global, micro, accumulation] = asked;
  const std::string ranks = ranks_text(world_size);
  if (!global) {
    const std::int64_t steps = accumulation.value_or(1);
    return {.micro = *micro, .accumulation = steps, .global = *micro * steps * world_size};
  }
  if (micro && accumulation) {
    const std::int64_t product = *micro * *accumulation * world_size;
    if (product == *global)
      return {.micro = *micro, .accumulation = *accumulation, .global = *global};
    throw UsageError("{} {} is not {} {} × {} {} × {} = {}: leave one of the three out to have it "
                     "filled in, set {} to {}, or start {}",
                     kGlobal, *global, kMicro, *micro, kAccumulation, *accumulation, ranks, product,
                     kGlobal, product, ranks_text(*global / (*micro * *accumulation)));
  }
  if (micro) {
    const std::int64_t unit = *micro * world_size;
    if (*global % unit == 0)
      return {.micro = *micro, .accumulation = *global / unit, .global = *global};
    throw UsageError("{} {} is no multiple of {} {} × {} = {}, so {} cannot be filled in: set {} "
                     "to {}, change {}, or start another number of ranks",
                     kGlobal, *global, kMicro, *micro, ranks, unit, kAccumulation, kGlobal,
                     multiples_near(*global, unit), kMicro);
  }
  const std::int64_t steps = accumulation.value_or(1);
  const std::int64_t unit = steps * world_size;
  if (*global % unit == 0)
    return {.micro = *global / unit, .accumulation = steps, .global = *global};
  const std::string parts =
      accumulation ? fmt::format("{} {} × {} = {}", kAccumulation, steps, ranks, unit) : ranks;
  throw UsageError("{} {} cannot be divided evenly among {}: set it to {}, or start another number "
                   "of ranks",
                   kGlobal, *global, parts, multiples_near(*global, unit));
}

}  // namespace lockstep::train

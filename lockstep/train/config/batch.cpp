#include <lockstep/train/config/batch.h>

#include <lockstep/base/error.h>
#include <lockstep/train/config/elasticity.h>

namespace lockstep::train {

namespace {

constexpr const char* kGlobal = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";

std::string ranks_text(std::int64_t world_size) {
  return world_size == 1 ? "1 rank" : fmt::format("{} ranks", world_size);
}

// The ranks that have samples of their own, in words: each is a rank, or several that work
// together.
std::string shares_text(std::int64_t num_ranks, std::int64_t ranks_together) {
  if (ranks_together == 1) return ranks_text(num_ranks);
  return fmt::format("{} share{} of the data", num_ranks, num_ranks == 1 ? "" : "s");
}

// "8 or 12": the multiples of `unit` on both sides of a number that is none.
std::string multiples_near(std::int64_t number, std::int64_t unit) {
  const std::int64_t below = number / unit * unit;
  return below == 0 ? fmt::format("{}", unit) : fmt::format("{} or {}", below, below + unit);
}

std::int64_t parts(std::int64_t whole, std::int64_t part) {
  return whole / part + (whole % part != 0 ? 1 : 0);
}

// "10 or 11", "1 or none"
std::string share_text(std::int64_t samples, std::int64_t num_ranks) {
  const std::int64_t most = parts(samples, num_ranks);
  if (samples % num_ranks == 0) return fmt::format("{}", most);
  return most == 1 ? "1 or none" : fmt::format("{} or {}", most - 1, most);
}

}  // namespace

std::string batch_contradiction(const BatchSection& asked) {
  const auto& [global, micro, accumulation] = asked;
  if (!global && !micro)
    return fmt::format("neither {} (samples of a step, on all ranks) nor {} (samples of one "
                       "forward pass, on one rank) is given: set at least one of them",
                       kGlobal, kMicro);
  if (!global || !micro || !accumulation) return "";
  const std::int64_t unit = *micro * *accumulation;
  if (*global % unit == 0) return "";
  return fmt::format("{} {} is no multiple of {} {} × {} {} = {}, so no number of ranks can train "
                     "with it: make it {}, or leave {} out to have it filled in",
                     kGlobal, *global, kMicro, *micro, kAccumulation, *accumulation, unit,
                     multiples_near(*global, unit), kAccumulation);
}

Batch divide_batch(std::int64_t global, std::int64_t num_ranks, std::int64_t most_micro) {
  LOCKSTEP_CHECK(global >= 1 && num_ranks >= 1 && most_micro >= 1, "{} on {} ranks, {} at once",
                 global, num_ranks, most_micro);
  const std::int64_t of_a_rank = parts(global, num_ranks);
  const std::int64_t passes = parts(of_a_rank, most_micro);
  const std::int64_t micro = parts(of_a_rank, passes);
  return {.micro = micro, .accumulation = parts(of_a_rank, micro), .global = global};
}

Batch resolve_batch(const BatchSection& asked, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun, std::int64_t ranks_together) {
  LOCKSTEP_CHECK(num_ranks >= 1, "{} ranks", num_ranks);
  if (const std::string wrong = batch_contradiction(asked); !wrong.empty()) throw UsageError(wrong);
  const auto& [global, micro, accumulation] = asked;
  if (begun) return divide_batch(begun->global, num_ranks, micro.value_or(begun->micro));
  if (!global) {
    const std::int64_t passes = accumulation.value_or(1);
    return {.micro = *micro, .accumulation = passes, .global = *micro * passes * num_ranks};
  }
  const std::int64_t of_a_rank = parts(*global, num_ranks);
  if (!micro) return divide_batch(*global, num_ranks, parts(of_a_rank, accumulation.value_or(1)));
  if (!accumulation) return divide_batch(*global, num_ranks, *micro);
  const std::int64_t product = *micro * *accumulation * num_ranks;
  if (product == *global)
    return {.micro = *micro, .accumulation = *accumulation, .global = *global};
  throw UsageError(
      "{} {} is not {} {} × {} {} × {}{} = {}: leave one of the three out to have it "
      "filled in, set {} to {}, or start {}",
      kGlobal, *global, kMicro, *micro, kAccumulation, *accumulation,
      shares_text(num_ranks, ranks_together),
      ranks_together == 1 ? "" : fmt::format(" (of {} each)", ranks_text(ranks_together)), product,
      kGlobal, product, ranks_text(*global / (*micro * *accumulation) * ranks_together));
}

Batch resolve_batch(const TrainConfig& config, std::int64_t num_ranks,
                    const std::optional<BegunBatch>& begun) {
  const std::int64_t ranks_together = config.parallel.ranks_together();
  if (!config.elasticity) return resolve_batch(config.batch, num_ranks, begun, ranks_together);
  return elastic_batch(*config.elasticity, num_ranks, ranks_together);
}

std::string batch_note(const Batch& batch, std::int64_t num_ranks,
                       const std::optional<BegunBatch>& begun, std::int64_t ranks_together) {
  const bool even = batch.micro * batch.accumulation * num_ranks == batch.global;
  const bool kept = begun && begun->num_ranks != num_ranks;
  if (even && !kept) return "";
  return fmt::format("a step has {}{} samples{}: {} of each of {}, in {} pass{} of at most {}",
                     kept ? "the " : "", batch.global,
                     kept ? " that it had on " + shares_text(begun->num_ranks, ranks_together) : "",
                     share_text(batch.global, num_ranks), shares_text(num_ranks, ranks_together),
                     batch.accumulation, batch.accumulation == 1 ? "" : "es", batch.micro);
}

}  // namespace lockstep::train

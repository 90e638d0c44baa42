#include <lockstep/train/config/batch.h>

#include <algorithm>
#include <numeric>
#include <set>

#include <lockstep/base/error.h>
#include <lockstep/train/config/sections.h>

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

namespace {

struct Composite {
  std::int64_t number = 1;
  std::int64_t num_divisors = 1;
};

// All products of the first primes, in powers that do not rise: among them are those numbers that
// have more divisors than any below them.
void add_products(const Composite& from, std::size_t prime, int most_power, std::int64_t limit,
                  std::vector<Composite>& all) {
  constexpr std::int64_t kPrimes[] = {2, 3, 5, 7, 11, 13, 17, 19};
  all.push_back(from);
  if (prime == std::size(kPrimes)) return;
  Composite next = from;
  for (int power = 1; power <= most_power; ++power) {
    if (next.number > limit / kPrimes[prime]) return;
    next.number *= kPrimes[prime];
    next.num_divisors = from.num_divisors * (power + 1);
    add_products(next, prime + 1, power, limit, all);
  }
}

// The largest number up to `limit` that has more divisors than any below it.
std::int64_t highly_composite(std::int64_t limit) {
  std::vector<Composite> all;
  add_products({}, 0, 62, limit, all);
  std::ranges::sort(all, {}, &Composite::number);
  Composite best = all.front();
  for (const Composite& one : all)
    if (one.num_divisors > best.num_divisors) best = one;
  return best.number;
}

// No product of the two: the config's may be as large as it likes.
bool allowed(const ElasticitySection& elasticity, std::int64_t num_data_ranks,
             std::int64_t ranks_together) {
  const std::int64_t least =
      elasticity.min_ranks / ranks_together + (elasticity.min_ranks % ranks_together != 0 ? 1 : 0);
  return num_data_ranks >= least && num_data_ranks <= elasticity.max_ranks / ranks_together;
}

std::vector<std::int64_t> even_ranks(std::int64_t global, const ElasticitySection& elasticity,
                                     std::int64_t ranks_together) {
  std::set<std::int64_t> found;
  const auto add = [&](std::int64_t ranks) {
    if (allowed(elasticity, ranks, ranks_together)) found.insert(ranks);
  };
  for (const std::int64_t micro : elasticity.micro_batches) {
    if (global % micro != 0) continue;
    const std::int64_t most = global / micro;
    for (std::int64_t divisor = 1; divisor * divisor <= most; ++divisor)
      if (most % divisor == 0) {
        add(divisor);
        add(most / divisor);
      }
  }
  return {found.begin(), found.end()};
}

// Their least common multiple, where that is not above the limit.
std::int64_t common_multiple(const std::vector<std::int64_t>& numbers, std::int64_t limit) {
  std::int64_t multiple = 1;
  for (const std::int64_t number : numbers) {
    multiple = std::lcm(multiple, number);
    if (multiple > limit) return numbers.front();
  }
  return multiple;
}

}  // namespace

ElasticChoice choose_batch(const ElasticitySection& elasticity, std::int64_t ranks_together) {
  std::vector<std::int64_t> bases = elasticity.micro_batches;
  bases.push_back(common_multiple(bases, elasticity.max_global));
  ElasticChoice best;
  for (const std::int64_t base : bases) {
    const std::int64_t global = base * highly_composite(elasticity.max_global / base);
    auto ranks = even_ranks(global, elasticity, ranks_together);
    const bool preferred = elasticity.prefer_larger ? global > best.global : global < best.global;
    if (best.global == 0 || ranks.size() > best.even_data_ranks.size() ||
        (ranks.size() == best.even_data_ranks.size() && preferred))
      best = {.global = global, .even_data_ranks = std::move(ranks)};
  }
  return best;
}

Batch elastic_batch(const ElasticitySection& elasticity, std::int64_t num_data_ranks,
                    std::int64_t ranks_together) {
  if (!allowed(elasticity, num_data_ranks, ranks_together))
    throw UsageError("elasticity is for {} to {} ranks (min_gpus, max_gpus), and there {} {}{}: "
                     "start other ranks, or change them",
                     elasticity.min_ranks, elasticity.max_ranks,
                     num_data_ranks == 1 && ranks_together == 1 ? "is" : "are", num_data_ranks,
                     ranks_together == 1 ? "" : fmt::format(" times {}", ranks_together));
  const std::int64_t global = choose_batch(elasticity, ranks_together).global;
  std::vector<std::int64_t> sizes = elasticity.micro_batches;
  std::ranges::sort(sizes, std::greater<>());
  if (global % num_data_ranks == 0)
    for (const std::int64_t micro : sizes)
      if (global / num_data_ranks % micro == 0) return divide_batch(global, num_data_ranks, micro);
  return divide_batch(global, num_data_ranks, sizes.front());
}

}  // namespace lockstep::train

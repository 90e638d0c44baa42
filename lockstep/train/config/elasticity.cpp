#include <lockstep/train/config/elasticity.h>

#include <algorithm>
#include <numeric>
#include <set>

#include <lockstep/base/error.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

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

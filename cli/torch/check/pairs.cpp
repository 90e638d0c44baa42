#include <cli/torch/check/pairs.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/backends/table.h>

namespace lockstep::cli::inspection {

namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kAllPairsUpTo = 16;
constexpr std::size_t kMostPairs = 256;
constexpr std::int64_t kSmallBytes = 8;
constexpr std::int64_t kMediumBytes = 256 << 10;
constexpr std::int64_t kLargeBytes = 4 << 20;
// For one link's messages, warm-up included: more than this means a link that is broken.
constexpr milliseconds kCallTimeout{30'000};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One end of a link between two ranks; both ends make the same calls.
class Link {
 public:
  Link(comm::Communicator& world, int peer, bool leads, at::DeviceType device)
      : world_(world), peer_(peer), leads_(leads), options_(at::device(device)) {}

  // Bytes to the peer and back, `rounds` times; the median of one way, in seconds.
  double one_way(std::int64_t num_bytes, int rounds) {
    const at::Tensor bytes = at::zeros({num_bytes}, options_.dtype(at::kByte));
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
      const auto start = Clock::now();
      transfer(leads_, bytes);
      transfer(!leads_, bytes);
      times.push_back(Seconds(Clock::now() - start).count() / 2);
    }
    return median(times);
  }

  // Returns the leading end's value on both ends.
  std::int64_t agree(std::int64_t value) {
    const at::Tensor number = at::full({1}, value, options_.dtype(at::kLong));
    transfer(leads_, number);
    return number.item<std::int64_t>();
  }

 private:
  void transfer(bool sends, const at::Tensor& tensor) {
    world_
        .exchange({sends ? comm::send_to(peer_, tensor) : comm::receive_from(peer_, tensor)},
                  {.timeout = kCallTimeout, .launch = comm::Launch::on_wait})
        .wait_on_host();
  }

  comm::Communicator& world_;
  int peer_;
  bool leads_;
  at::TensorOptions options_;
};

int rounds_within(double budget_seconds, double one_way_seconds, int fewest, int most) {
  return static_cast<int>(
      std::clamp(budget_seconds / (2 * one_way_seconds), double(fewest), double(most)));
}

void measure(Link& link, double budget_seconds, Pair& pair) {
  link.one_way(kSmallBytes, 3);
  int rounds = rounds_within(budget_seconds / 3, link.one_way(kSmallBytes, 3), 3, 500);
  rounds = static_cast<int>(link.agree(rounds));
  pair.latency_us = link.one_way(kSmallBytes, rounds) * 1e6;

  const double medium = link.one_way(kMediumBytes, 2);
  const double large = medium * (double(kLargeBytes) / kMediumBytes);
  const std::int64_t bytes = link.agree(4 * large < budget_seconds ? kLargeBytes : kMediumBytes);
  link.one_way(bytes, 1);  // the first touches memory
  const double estimate = bytes == kLargeBytes ? large : medium;
  rounds = static_cast<int>(link.agree(rounds_within(budget_seconds / 2, estimate, 2, 50)));
  pair.bandwidth_gbps = double(bytes) / link.one_way(bytes, rounds) / 1e9;
}

// Every rank walks through all pairs; two measure, the rest wait. Returns what this rank's pairs
// gave, summed over ranks: everyone's.
at::Tensor measure_all(comm::Communicator& world, std::vector<Pair> pairs, at::DeviceType device) {
  const double budget = std::clamp(5.0 / double(pairs.size()), 0.05, 0.5);
  at::Tensor figures = at::zeros({static_cast<std::int64_t>(pairs.size()), 2},
                                 at::device(at::kCPU).dtype(at::kDouble));
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    Pair& pair = pairs[i];
    if (world.rank() == pair.a || world.rank() == pair.b) {
      const bool leads = world.rank() == pair.a;
      Link link(world, leads ? pair.b : pair.a, leads, device);
      measure(link, budget, pair);
      if (leads) {
        figures[static_cast<std::int64_t>(i)][0] = pair.latency_us;
        figures[static_cast<std::int64_t>(i)][1] = pair.bandwidth_gbps;
      }
    }
    world.barrier({.timeout = 4 * kCallTimeout}).wait_on_host();
  }
  figures = figures.to(device);
  world.all_reduce(figures).wait_on_host();
  return figures.to(at::kCPU);
}

}  // namespace

std::vector<RankPair> choose_pairs(int num_ranks) {
  std::vector<RankPair> pairs;
  if (num_ranks <= kAllPairsUpTo) {
    for (int a = 0; a < num_ranks; ++a)
      for (int b = a + 1; b < num_ranks; ++b) pairs.emplace_back(a, b);
    return pairs;
  }
  std::set<RankPair> chosen;
  const auto add = [&](int a, int b) {
    if (a != b) chosen.emplace(std::min(a, b), std::max(a, b));
  };
  const int step = std::max(1, num_ranks / static_cast<int>(kMostPairs / 2));
  for (int a = 0; a < num_ranks && chosen.size() < kMostPairs / 2; a += step)
    add(a, (a + 1) % num_ranks);
  const std::size_t wanted = std::min(kMostPairs, chosen.size() * 2);
  std::minstd_rand random(static_cast<unsigned>(num_ranks));  // the same on every rank
  while (chosen.size() < wanted)
    add(static_cast<int>(random() % static_cast<unsigned>(num_ranks)),
        static_cast<int>(random() % static_cast<unsigned>(num_ranks)));
  return {chosen.begin(), chosen.end()};
}

std::vector<std::size_t> slow_pairs(const std::vector<Pair>& pairs) {
  constexpr std::size_t kFewestToCompare = 3;
  constexpr double kMuchSlower = 4;
  constexpr double kLatencyThatMatters = 20;  // microseconds above the median
  std::map<std::string, std::vector<double>> latencies, bandwidths;
  for (const Pair& pair : pairs) {
    latencies[pair.transport].push_back(pair.latency_us);
    bandwidths[pair.transport].push_back(pair.bandwidth_gbps);
  }
  std::vector<std::size_t> slow;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const Pair& pair = pairs[i];
    if (latencies[pair.transport].size() < kFewestToCompare) continue;
    const double latency = median(latencies[pair.transport]);
    const double bandwidth = median(bandwidths[pair.transport]);
    if (pair.bandwidth_gbps * kMuchSlower < bandwidth ||
        (pair.latency_us > kMuchSlower * latency &&
         pair.latency_us > latency + kLatencyThatMatters))
      slow.push_back(i);
  }
  return slow;
}

std::vector<Pair> measure_pairs(comm::Communicator& world, const std::vector<Rank>& ranks,
                                at::DeviceType device) {
  std::vector<Pair> pairs;
  for (const auto& [a, b] : choose_pairs(world.size())) {
    const bool on_one_host =
        ranks[static_cast<std::size_t>(a)].host_id == ranks[static_cast<std::size_t>(b)].host_id;
    std::string transport = device == at::kCUDA ? world.lane() : world.backend();
    if (const auto row = comm::backends::find(transport))
      transport = on_one_host ? row->inside_a_host : row->between_hosts;
    pairs.push_back({.a = a, .b = b, .transport = std::move(transport)});
  }
  const at::Tensor figures = measure_all(world, pairs, device);
  const auto figure = [](const at::Tensor& all, std::size_t pair, int which) {
    return all[static_cast<std::int64_t>(pair)][which].item<double>();
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    pairs[i].latency_us = figure(figures, i, 0);
    pairs[i].bandwidth_gbps = figure(figures, i, 1);
  }
  const std::vector<std::size_t> doubtful = slow_pairs(pairs);
  if (doubtful.empty()) return pairs;
  std::vector<Pair> again;
  for (const std::size_t i : doubtful) again.push_back(pairs[i]);
  const at::Tensor second = measure_all(world, again, device);
  for (std::size_t i = 0; i < doubtful.size(); ++i) {
    Pair& pair = pairs[doubtful[i]];
    pair.latency_us = std::min(pair.latency_us, figure(second, i, 0));
    pair.bandwidth_gbps = std::max(pair.bandwidth_gbps, figure(second, i, 1));
  }
  return pairs;
}

}  // namespace lockstep::cli::inspection

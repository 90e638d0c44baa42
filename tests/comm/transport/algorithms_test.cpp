// Every algorithm gives the same bits over every kind of link: those of a plain recursive sum.
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include <lockstep/base/float16.h>
#include <lockstep/comm/algorithms/reduction.h>

#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using Values = std::vector<std::byte>;

#if defined(LOCKSTEP_SANITIZED)
constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::int64, DType::boolean};
#else
constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16,
                             DType::int32,   DType::int64,   DType::uint8,   DType::boolean};
#endif

bool floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 ||
         dtype == DType::bfloat16;
}

// Values of very different sizes, which make the order of addition show.
Values random_values(DType dtype, std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  Values values(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const double number = normal(generator) * std::exp(2 * normal(generator));
    std::byte* at = values.data() + i * size_of(dtype);
    const auto store = [at](auto value) { std::memcpy(at, &value, sizeof(value)); };
    switch (dtype) {
      case DType::float32: store(static_cast<float>(number)); break;
      case DType::float64: store(number); break;
      case DType::float16: store(to_float16(static_cast<float>(number))); break;
      case DType::bfloat16: store(to_bfloat16(static_cast<float>(number))); break;
      case DType::int32: store(static_cast<std::int32_t>(number * 1e6)); break;
      case DType::int64: store(static_cast<std::int64_t>(number * 1e12)); break;
      case DType::uint8: store(static_cast<std::uint8_t>(generator())); break;
      case DType::boolean: store(static_cast<std::uint8_t>(generator() % 4 == 0)); break;
    }
  }
  return values;
}

// The expected result, element by element, from the rule as it is written.
template <typename A, typename Load>
A tree_value(const std::vector<Values>& inputs, int first, int n, std::size_t i, ReduceOp op,
             Load load) {
  if (n == 1) return load(inputs[static_cast<std::size_t>(first)], i);
  int left = 1;
  while (left * 2 < n) left *= 2;
  const A a = tree_value<A>(inputs, first, left, i, op, load);
  const A b = tree_value<A>(inputs, first + left, n - left, i, op, load);
  switch (op) {
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    default: return static_cast<A>(a + b);
  }
}

template <typename T, typename A>
Values expected_of(const std::vector<Values>& inputs, ReduceOp op, A (*widen)(T), T (*narrow)(A)) {
  const int n = static_cast<int>(inputs.size());
  Values result(inputs.front().size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    A value = tree_value<A>(inputs, 0, n, i, op, [widen](const Values& from, std::size_t at) {
      T element;
      std::memcpy(&element, from.data() + at * sizeof(T), sizeof(T));
      return widen(element);
    });
    if (op == ReduceOp::mean) value = static_cast<A>(value / static_cast<A>(n));
    const T element = narrow(value);
    std::memcpy(result.data() + i * sizeof(T), &element, sizeof(T));
  }
  return result;
}

template <typename T>
Values expected_plain(const std::vector<Values>& inputs, ReduceOp op) {
  return expected_of<T, T>(
      inputs, op, [](T v) { return v; }, [](T v) { return v; });
}

Values expected(DType dtype, const std::vector<Values>& inputs, ReduceOp op) {
  switch (dtype) {
    case DType::float32: return expected_plain<float>(inputs, op);
    case DType::float64: return expected_plain<double>(inputs, op);
    case DType::int32:
      // Sums are unsigned, so that wrapping is defined; the bits are the same. Min and max need the
      // sign.
      return op == ReduceOp::sum ? expected_plain<std::uint32_t>(inputs, op)
                                 : expected_plain<std::int32_t>(inputs, op);
    case DType::int64:
      return op == ReduceOp::sum ? expected_plain<std::uint64_t>(inputs, op)
                                 : expected_plain<std::int64_t>(inputs, op);
    case DType::uint8: return expected_plain<std::uint8_t>(inputs, op);
    case DType::boolean:
      return expected_plain<std::uint8_t>(inputs, op == ReduceOp::min ? op : ReduceOp::max);
    case DType::float16:
      return expected_of<Float16, float>(
          inputs, op, [](Float16 v) { return to_float(v); }, [](float v) { return to_float16(v); });
    case DType::bfloat16:
      return expected_of<BFloat16, float>(
          inputs, op, [](BFloat16 v) { return to_float(v); },
          [](float v) { return to_bfloat16(v); });
  }
  return {};
}

struct Layout {
  std::string name;
  RankSettings settings;
};

// Ways to spread n ranks: shared memory, TCP, and hosts of equal, unequal and interleaved ranks.
std::vector<Layout> layouts_of(int n) {
  std::vector<Layout> layouts = {{"shm", {}}, {"tcp", {.media = Media::tcp}}};
  if (n < 3) return layouts;
  std::vector<int> halves;
  std::vector<int> uneven;
  std::vector<int> interleaved;
  for (int rank = 0; rank < n; ++rank) {
    halves.push_back(rank < (n + 1) / 2 ? 0 : 1);
    uneven.push_back(rank == 0 ? 0 : rank < 3 ? 1 : 2);
    interleaved.push_back(rank % 2);
  }
  layouts.push_back({"two hosts", {.hosts = halves}});
  layouts.push_back({"uneven hosts", {.hosts = uneven}});
  layouts.push_back({"interleaved hosts", {.hosts = interleaved}});
  return layouts;
}

class Algorithms : public ::testing::TestWithParam<int> {};

TEST_P(Algorithms, AllReduceHasTheCanonicalBits) {
  const int n = GetParam();
  struct Case {
    DType dtype;
    ReduceOp op;
    std::size_t count;
  };
  std::vector<Case> cases;
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max}) {
      if (op == ReduceOp::mean && !floating(dtype)) continue;
      for (const std::size_t count : {0, 1, 17, 5003}) cases.push_back({dtype, op, count});
    }
  }
  cases.push_back({DType::float32, ReduceOp::sum, 300'007});
  cases.push_back({DType::bfloat16, ReduceOp::sum, 300'007});

  std::vector<std::vector<Values>> inputs;
  std::vector<Values> wanted;
  for (const Case& one : cases) {
    std::vector<Values> per_rank;
    for (int rank = 0; rank < n; ++rank)
      per_rank.push_back(
          random_values(one.dtype, one.count,
                        static_cast<unsigned>(cases.size() * 100 + wanted.size()) * 31 +
                            static_cast<unsigned>(rank)));
    wanted.push_back(expected(one.dtype, per_rank, one.op));
    inputs.push_back(std::move(per_rank));
  }
  for (const Layout& layout : layouts_of(n)) {
    run_ranks(n, layout.settings, [&](Transport& transport) {
      std::uint64_t sequence = 0;
      for (const Algorithm algorithm : algorithms_of(Operation::all_reduce)) {
        for (std::size_t i = 0; i < cases.size(); ++i) {
          // Some ranks' buffers are in memory that peers can reach, others are not.
          const Values& input = inputs[i][static_cast<std::size_t>(transport.rank())];
          Values data = input;
          std::shared_ptr<std::byte> shared;
          Bytes buffer = data;
          if ((i + static_cast<std::size_t>(transport.rank()) + sequence) % 3 != 0) {
            shared = transport.heap().allocate(input.size());
            std::copy(input.begin(), input.end(), shared.get());
            buffer = {shared.get(), input.size()};
          }
          begin_call(transport, {.sequence = ++sequence, .count = cases[i].count},
                     milliseconds(20000));
          const double divisor = cases[i].op == ReduceOp::mean ? n : 1;
          all_reduce(transport, algorithm, {cases[i].dtype, cases[i].op, divisor}, buffer);
          ASSERT_TRUE(std::equal(buffer.begin(), buffer.end(), wanted[i].begin()))
              << layout.name << ", " << n << " ranks, " << name(algorithm) << ", "
              << name(cases[i].op) << " of " << cases[i].count << " " << name(cases[i].dtype);
        }
      }
    });
  }
}

TEST_P(Algorithms, ReduceScatterHasTheCanonicalBits) {
  const int n = GetParam();
  // The parts are uneven; with several ranks one part is empty.
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < n; ++rank)
    counts.push_back(rank == 1 ? 0 : static_cast<std::size_t>(100 + 40'000 * rank));
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
    std::vector<std::vector<Values>> inputs(static_cast<std::size_t>(n));  // [from][to]
    for (int from = 0; from < n; ++from)
      for (int to = 0; to < n; ++to)
        inputs[static_cast<std::size_t>(from)].push_back(random_values(
            dtype, counts[static_cast<std::size_t>(to)], static_cast<unsigned>(from * 64 + to)));
    for (const Layout& layout : layouts_of(n)) {
      run_ranks(n, layout.settings, [&](Transport& transport) {
        const auto self = static_cast<std::size_t>(transport.rank());
        std::vector<Values> contributions;
        for (const auto& from : inputs) contributions.push_back(from[self]);
        const Values wanted = expected(dtype, contributions, ReduceOp::sum);
        std::uint64_t sequence = 0;
        for (const Algorithm algorithm : algorithms_of(Operation::reduce_scatter)) {
          Values output(wanted.size());
          std::vector<ConstBytes> mine(inputs[self].begin(), inputs[self].end());
          begin_call(transport, {.sequence = ++sequence}, milliseconds(20000));
          reduce_scatter(transport, algorithm, {dtype, ReduceOp::sum}, output, mine);
          EXPECT_TRUE(output == wanted) << layout.name << ", " << name(algorithm);
        }
      });
    }
  }
}

TEST_P(Algorithms, GatherBroadcastAndAllToAllMoveEveryByte) {
  const int n = GetParam();
  const auto content = [](int from, int to, std::size_t size) {
    Values values(size);
    for (std::size_t i = 0; i < size; ++i)
      values[i] = std::byte(static_cast<unsigned>(from * 7 + to * 13) + i * 31 + (i >> 8));
    return values;
  };
  const auto size_from = [](int from, int to) {
    return from == 2 ? std::size_t{0} : static_cast<std::size_t>(3 + from * 250'001 + to * 17);
  };
  for (const Layout& layout : layouts_of(n)) {
    run_ranks(n, layout.settings, [&](Transport& transport) {
      const int self = transport.rank();
      std::uint64_t sequence = 0;
      for (const Algorithm algorithm : algorithms_of(Operation::all_gather)) {
        std::vector<Values> outputs;
        for (int from = 0; from < n; ++from) outputs.emplace_back(size_from(from, 0));
        const std::vector<Bytes> spans(outputs.begin(), outputs.end());
        const Values input = content(self, 0, size_from(self, 0));
        begin_call(transport, {.sequence = ++sequence}, milliseconds(20000));
        all_gather(transport, algorithm, spans, input);
        for (int from = 0; from < n; ++from)
          EXPECT_TRUE(outputs[static_cast<std::size_t>(from)] ==
                      content(from, 0, size_from(from, 0)))
              << layout.name << ", " << name(algorithm) << ", from " << from;
      }
      for (const Algorithm algorithm : algorithms_of(Operation::broadcast)) {
        for (int root = 0; root < n; ++root) {
          for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{700'001}}) {
            Values data = self == root ? content(root, 1, size) : Values(size);
            begin_call(transport, {.sequence = ++sequence, .root = root}, milliseconds(20000));
            broadcast(transport, algorithm, data, root);
            EXPECT_TRUE(data == content(root, 1, size)) << layout.name << ", " << name(algorithm);
          }
        }
      }
      std::vector<Values> inputs;
      std::vector<Values> outputs;
      for (int peer = 0; peer < n; ++peer) {
        inputs.push_back(content(self, peer, size_from(self, peer)));
        outputs.emplace_back(size_from(peer, self));
      }
      const std::vector<ConstBytes> sent(inputs.begin(), inputs.end());
      const std::vector<Bytes> taken(outputs.begin(), outputs.end());
      begin_call(transport, {.sequence = ++sequence}, milliseconds(20000));
      all_to_all(transport, taken, sent);
      for (int peer = 0; peer < n; ++peer)
        EXPECT_TRUE(outputs[static_cast<std::size_t>(peer)] ==
                    content(peer, self, size_from(peer, self)))
            << layout.name;
      begin_call(transport, {.sequence = ++sequence}, milliseconds(20000));
      barrier(transport);
    });
  }
}

#if defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(Ranks, Algorithms, ::testing::Values(2, 3));
#elif defined(LOCKSTEP_SANITIZED)
INSTANTIATE_TEST_SUITE_P(Ranks, Algorithms, ::testing::Values(1, 2, 3, 5));
#else
INSTANTIATE_TEST_SUITE_P(Ranks, Algorithms, ::testing::Values(1, 2, 3, 4, 5, 7, 8));
#endif

TEST(ReductionTree, LargestNodesTileAnySet) {
  for (int n = 1; n <= 40; ++n) {
    for (int hosts = 1; hosts <= 5; ++hosts) {
      for (int host = 0; host < hosts; ++host) {
        const auto in_set = [&](int rank) { return rank * hosts / n == host; };
        int next = 0;
        for (const TreeNode& node : largest_nodes_within(n, in_set)) {
          for (; next < node.first; ++next) EXPECT_FALSE(in_set(next));
          for (int i = 0; i < node.count; ++i) EXPECT_TRUE(in_set(node.first + i));
          next = node.first + node.count;
        }
        for (; next < n; ++next) EXPECT_FALSE(in_set(next));
      }
    }
  }
  // The ranks {0, 1} and {2} are nodes of the tree over six, {0, 1, 2} is not.
  const auto nodes = largest_nodes_within(6, [](int rank) { return rank < 3; });
  EXPECT_EQ(nodes, (std::vector<TreeNode>{{0, 2}, {2, 1}}));
}

}  // namespace
}  // namespace lockstep::comm::testing

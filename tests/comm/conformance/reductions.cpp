// all_reduce and reduce_scatter: every dtype, reduction, size and algorithm.
#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/comm/call.h>

#include "reference.h"
#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

constexpr std::int64_t kHuge = 800'001;

std::string label(Operation operation, at::ScalarType dtype, ReduceOp op, std::int64_t count) {
  return fmt::format("{} {} of {} {}", name(operation), name(op), count, name(dtype_of(dtype)));
}

void expect_result(Suite& suite, const at::Tensor& got, const at::Tensor& wanted,
                   const std::vector<at::Tensor>& inputs, ReduceOp op, const std::string& what) {
  if (suite.group().canonical_order()) return suite.expect_same(got, wanted, what);
  suite.expect(within_rounding(got, wanted, inputs, op), what + ": beyond rounding");
}

std::vector<at::Tensor> inputs_of_all(Suite& suite, at::ScalarType dtype, std::int64_t count,
                                      std::uint64_t seed) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < suite.size(); ++rank)
    inputs.push_back(values(dtype, count, seed * 64 + static_cast<std::uint64_t>(rank)));
  return inputs;
}

void check_all_reduce(Suite& suite, const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::Tensor wanted = canonical(inputs, op);
  const at::Tensor& mine = inputs[static_cast<std::size_t>(suite.rank())];
  for (const Algorithm algorithm : suite.algorithms(Operation::all_reduce)) {
    at::Tensor tensor = suite.place(mine);
    suite.group().all_reduce(tensor, op, {.algorithm = algorithm}).wait();
    expect_result(suite, tensor, wanted, inputs, op, name(algorithm));
  }
}

// Rank r gets counts[r] elements.
void check_reduce_scatter(Suite& suite, at::ScalarType dtype, ReduceOp op,
                          const std::vector<std::int64_t>& counts, std::uint64_t seed) {
  const auto self = static_cast<std::size_t>(suite.rank());
  bool even = true;
  std::vector<at::Tensor> to_me;  // indexed by sender
  std::vector<at::Tensor> mine;   // indexed by receiver
  for (int from = 0; from < suite.size(); ++from)
    to_me.push_back(
        values(dtype, counts[self], seed * 64 + static_cast<std::uint64_t>(from) * 8 + self));
  for (std::size_t to = 0; to < counts.size(); ++to) {
    mine.push_back(values(dtype, counts[to], seed * 64 + self * 8 + to));
    even = even && counts[to] == counts[0];
  }
  const at::Tensor wanted = canonical(to_me, op);
  const at::Tensor whole = suite.place(at::cat(mine));
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : mine) parts.push_back(suite.place(part));
  for (const Algorithm algorithm : suite.algorithms(Operation::reduce_scatter)) {
    at::Tensor output = suite.room(counts[self], dtype);
    suite.group().reduce_scatter(output, parts, op, {.algorithm = algorithm}).wait();
    expect_result(suite, output, wanted, to_me, op, std::string("list, ") + name(algorithm));
    if (!even) continue;
    output = suite.room(counts[self], dtype);
    suite.group().reduce_scatter(output, whole, op, {.algorithm = algorithm}).wait();
    expect_result(suite, output, wanted, to_me, op, name(algorithm));
    suite.expect_same(whole, at::cat(mine), "the input is left alone");
  }
}

void check_coalesced(Suite& suite, at::ScalarType dtype, ReduceOp op,
                     const std::vector<std::int64_t>& counts) {
  for (const Algorithm algorithm : suite.algorithms(Operation::all_reduce)) {
    std::vector<at::Tensor> tensors;
    std::vector<std::vector<at::Tensor>> inputs;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      inputs.push_back(inputs_of_all(suite, dtype, counts[i], 1000 + i));
      tensors.push_back(suite.place(inputs.back()[static_cast<std::size_t>(suite.rank())]));
    }
    suite.group().all_reduce(tensors, op, {.algorithm = algorithm}).wait();
    for (std::size_t i = 0; i < counts.size(); ++i)
      expect_result(suite, tensors[i], canonical(inputs[i], op), inputs[i], op,
                    fmt::format("{}, tensor {}", name(algorithm), i));
  }
}

template <typename T>
at::Tensor filled(at::ScalarType dtype, std::int64_t count, T value) {
  return at::full({count}, value, at::TensorOptions().dtype(dtype));
}

// NaN on one rank, infinities of both signs, zeros of both signs.
void check_special_values(Suite& suite, at::ScalarType dtype) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const ReduceOp op : kReductions) {
    for (int bad = 0; bad < suite.size(); bad += std::max(suite.size() - 1, 1)) {
      suite.cell(fmt::format("all_reduce {} of {} with a NaN on rank {}", name(op),
                             name(dtype_of(dtype)), bad),
                 [&] {
                   auto inputs = inputs_of_all(suite, dtype, 33, 77);
                   inputs[static_cast<std::size_t>(bad)][5] = nan;
                   inputs[static_cast<std::size_t>(bad)][6] = -infinity;
                   inputs[static_cast<std::size_t>(suite.size() - 1 - bad)][7] = infinity;
                   check_all_reduce(suite, inputs, op);
                 });
    }
    suite.cell(fmt::format("all_reduce {} of {} zeros below zero", name(op), name(dtype_of(dtype))),
               [&] {
                 const std::vector<at::Tensor> inputs(static_cast<std::size_t>(suite.size()),
                                                      filled(dtype, 33, -0.0));
                 check_all_reduce(suite, inputs, op);
               });
  }
}

// Rank r has r + 1 times the expected result, and adds r + 1 to a divisor that is not waited for:
// the result is exact in every order of addition.
void check_divisor(Suite& suite, at::ScalarType dtype, std::int64_t count) {
  const at::Tensor wanted = at::arange(count, at::kDouble).remainder(61).to(dtype);
  const double weight = suite.rank() + 1;
  Communicator& group = suite.group();
  for (const Algorithm algorithm : suite.algorithms(Operation::all_reduce)) {
    const at::Tensor divisor = at::full({1}, weight, at::kDouble);
    at::Tensor whole = suite.place(wanted * weight);
    std::vector<at::Tensor> list = {suite.place(wanted * weight), suite.place(wanted * weight)};
    Work first = group.all_reduce(divisor);
    group.all_reduce(whole, ReduceOp::mean, {.algorithm = algorithm, .divisor = divisor}).wait();
    group.all_reduce(list, ReduceOp::mean, {.algorithm = algorithm, .divisor = divisor}).wait();
    first.wait();
    suite.expect_same(whole, wanted, name(algorithm));
    for (const at::Tensor& tensor : list) suite.expect_same(tensor, wanted, "in a list");
  }
  for (const Algorithm algorithm : suite.algorithms(Operation::reduce_scatter)) {
    const at::Tensor divisor = at::full({1}, weight, at::kDouble);
    const at::Tensor input = suite.place((wanted * weight).repeat({suite.size()}));
    at::Tensor output = suite.room(count, dtype);
    Work first = group.all_reduce(divisor);
    group
        .reduce_scatter(output, input, ReduceOp::mean, {.algorithm = algorithm, .divisor = divisor})
        .wait();
    first.wait();
    suite.expect_same(output, wanted, std::string("reduce_scatter, ") + name(algorithm));
  }
  at::Tensor nothing = suite.place(at::zeros({count}, dtype));
  group.all_reduce(nothing, ReduceOp::mean, {.divisor = at::zeros({1}, at::kDouble)}).wait();
  suite.expect_same(nothing, at::zeros({count}, dtype), "the mean over nothing");
  // This number exceeds the range of 16 bits.
  const double many = 70'001.0 * suite.size();
  at::Tensor small = suite.place(at::full({count}, 7, dtype));
  group.all_reduce(small, ReduceOp::mean, {.divisor = at::full({1}, many, at::kDouble)}).wait();
  const at::Tensor sum =
      at::full({count}, 7.0 * suite.size(), at::promote_types(dtype, at::kFloat));
  suite.expect_same(small, (sum / many).to(dtype), "a divisor beyond 16 bits");
}

}  // namespace

void check_reductions(Suite& suite) {
  const auto n = static_cast<std::size_t>(suite.size());
  std::uint64_t seed = 0;
  for (const at::ScalarType dtype : kDTypes) {
    for (const ReduceOp op : kReductions) {
      if (!defined(op, dtype)) continue;
      for (const std::int64_t count : kSizes) {
        ++seed;
        suite.cell(label(Operation::all_reduce, dtype, op, count),
                   [&] { check_all_reduce(suite, inputs_of_all(suite, dtype, count, seed), op); });
        suite.cell(label(Operation::reduce_scatter, dtype, op, count), [&] {
          check_reduce_scatter(suite, dtype, op, std::vector<std::int64_t>(n, count), seed);
        });
      }
      std::vector<std::int64_t> counts;
      for (std::size_t rank = 0; rank < n; ++rank)
        counts.push_back(rank == 1 ? 0 : 3 + static_cast<std::int64_t>(rank) * 1001);
      suite.cell(label(Operation::reduce_scatter, dtype, op, counts.back()) + ", uneven",
                 [&] { check_reduce_scatter(suite, dtype, op, counts, ++seed); });
    }
    if (at::isFloatingType(dtype)) check_special_values(suite, dtype);
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kBool}) {
    suite.cell(label(Operation::all_reduce, dtype, ReduceOp::sum, kLarge), [&] {
      check_all_reduce(suite, inputs_of_all(suite, dtype, kLarge, ++seed), ReduceOp::sum);
    });
    suite.cell(label(Operation::reduce_scatter, dtype, ReduceOp::sum, kLarge), [&] {
      std::vector<std::int64_t> counts(n, kLarge);
      check_reduce_scatter(suite, dtype, ReduceOp::sum, counts, ++seed);
      counts.front() = 1;
      counts.back() = 2 * kLarge;
      check_reduce_scatter(suite, dtype, ReduceOp::sum, counts, ++seed);
    });
  }
  suite.cell(label(Operation::all_reduce, at::kFloat, ReduceOp::mean, kHuge), [&] {
    check_all_reduce(suite, inputs_of_all(suite, at::kFloat, kHuge, ++seed), ReduceOp::mean);
  });

  if (suite.device().is_cpu())
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
      for (const std::int64_t count : {std::int64_t{17}, kLarge})
        suite.cell(label(Operation::all_reduce, dtype, ReduceOp::mean, count) + " by a divisor",
                   [&] { check_divisor(suite, dtype, count); });

  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kLong}) {
    const ReduceOp op = dtype == at::kHalf ? ReduceOp::mean : ReduceOp::sum;
    const std::string kind = name(dtype_of(dtype));
    suite.cell("all_reduce of a list of " + kind, [&] {
      check_coalesced(suite, dtype, op, {17, 0, 1, 5003, 0});
    });
    suite.cell("all_reduce of a list of empty tensors of " + kind, [&] {
      check_coalesced(suite, dtype, op, {0, 0, 0});
    });
    suite.cell("all_reduce of many small tensors of " + kind, [&] {
      std::vector<std::int64_t> counts;
      for (int i = 0; i < 300; ++i) counts.push_back(i % 8);
      check_coalesced(suite, dtype, op, counts);
    });
    suite.cell("all_reduce of small and large tensors of " + kind, [&] {
      check_coalesced(suite, dtype, op, {3, 50'001, 7, 200'003, 60'000, 0, 9});
    });
  }
  suite.cell("all_reduce of tensors of several dimensions and none", [&] {
    std::vector<at::Tensor> tensors = {
        suite.place(values(at::kFloat, 24, 5).view({2, 3, 4})),
        suite.place(values(at::kFloat, 1, 6).view(at::IntArrayRef{}))};
    suite.group().all_reduce(tensors, ReduceOp::max).wait();
    suite.expect_same(tensors[0].view({-1}), values(at::kFloat, 24, 5), "three dimensions");
    suite.expect_same(tensors[1].view({-1}), values(at::kFloat, 1, 6), "no dimension");
  });
}

}  // namespace lockstep::comm::conformance

#include "operations.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep::comm::backends {

namespace {

const std::vector<at::ScalarType> kTypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                         at::kInt,   at::kLong,   at::kByte, at::kBool};

// Small whole numbers: their sums are exact in every dtype.
at::Tensor sample(int rank, std::int64_t length, at::ScalarType type, int salt = 0) {
  at::Tensor values = at::arange(length, at::kLong).mul(7).add(rank * 3 + salt).remainder(11);
  if (type == at::kBool) return values.remainder(3).eq(0);
  if (type != at::kByte) values = values.sub(4);
  return values.to(type);
}

at::Tensor expected_reduction(int size, std::int64_t length, at::ScalarType type, ReduceOp op,
                              int salt = 0) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < size; ++rank)
    all.push_back(sample(rank, length, type, salt).to(at::kDouble));
  const at::Tensor stacked = at::stack(all);
  at::Tensor result;
  switch (op) {
    case ReduceOp::sum: result = stacked.sum(0); break;
    case ReduceOp::mean: result = stacked.sum(0).to(at::kFloat).div(size); break;
    case ReduceOp::min: result = stacked.amin(0); break;
    case ReduceOp::max: result = stacked.amax(0); break;
  }
  if (op == ReduceOp::mean && type == at::kDouble) result = stacked.sum(0).div(size);
  if (type == at::kBool) return result.ne(0);
  return result.to(type);
}

// Large tensors are there for their size, so one reduction is enough.
std::vector<ReduceOp> reductions(at::ScalarType type, std::int64_t length) {
  if (length > 100'000) return {ReduceOp::sum};
  std::vector<ReduceOp> ops{ReduceOp::sum, ReduceOp::min, ReduceOp::max};
  if (at::isFloatingType(type)) ops.push_back(ReduceOp::mean);
  return ops;
}

std::string label(at::ScalarType type, std::int64_t length) {
  return std::string(c10::toString(type)) + " × " + std::to_string(length);
}

void check_type(Communicator& group, at::ScalarType type, std::int64_t length) {
  SCOPED_TRACE(label(type, length));
  const int size = group.size();
  const int rank = group.rank();
  for (const ReduceOp op : reductions(type, length)) {
    SCOPED_TRACE(name(op));
    at::Tensor tensor = sample(rank, length, type);
    group.all_reduce(tensor, op).wait();
    EXPECT_TRUE(tensor.equal(expected_reduction(size, length, type, op)));

    at::Tensor whole = sample(rank, length * size, type);
    at::Tensor part = at::zeros({length}, whole.options());
    group.reduce_scatter(part, whole, op).wait();
    EXPECT_TRUE(part.equal(
        expected_reduction(size, length * size, type, op).narrow(0, rank * length, length)));
  }

  at::Tensor gathered = at::zeros({length * size}, at::TensorOptions().dtype(type));
  group.all_gather(gathered, sample(rank, length, type)).wait();
  at::Tensor turned = at::zeros_like(gathered);
  group.all_to_all(turned, sample(rank, length * size, type)).wait();
  for (int peer = 0; peer < size; ++peer) {
    EXPECT_TRUE(gathered.narrow(0, peer * length, length).equal(sample(peer, length, type)));
    EXPECT_TRUE(turned.narrow(0, peer * length, length)
                    .equal(sample(peer, length * size, type).narrow(0, rank * length, length)));
  }

  const int root = size - 1;
  at::Tensor told =
      rank == root ? sample(77, length, type) : at::zeros_like(sample(0, length, type));
  group.broadcast(told, root).wait();
  EXPECT_TRUE(told.equal(sample(77, length, type)));

  if (size == 1) return;
  // A ring in both directions, in one call.
  const int right = (rank + 1) % size;
  const int left = (rank + size - 1) % size;
  at::Tensor from_left = at::zeros_like(told);
  at::Tensor from_right = at::zeros_like(told);
  group
      .exchange({send_to(right, sample(rank, length, type, 1)), receive_from(left, from_left),
                 send_to(left, sample(rank, length, type, 2)), receive_from(right, from_right)})
      .wait();
  EXPECT_TRUE(from_left.equal(sample(left, length, type, 1)));
  EXPECT_TRUE(from_right.equal(sample(right, length, type, 2)));
}

void check_nans(Communicator& group) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(type));
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
      at::Tensor tensor = at::zeros({4}, at::kDouble);
      if (group.rank() == 0) {
        tensor[0] = nan;
        tensor[1] = -nan;
        tensor[2] = op == ReduceOp::min ? -infinity : infinity;
        tensor[3] = op == ReduceOp::min ? -0.5 : 0.5;
      }
      const at::Tensor expected = [&] {
        at::Tensor values = at::zeros({4}, at::kDouble);
        values[2] = op == ReduceOp::min ? -infinity : infinity;
        values[3] = op == ReduceOp::min ? -0.5 : 0.5;
        return values;
      }();
      tensor = tensor.to(type);
      group.all_reduce(tensor, op).wait();
      EXPECT_TRUE(tensor[0].isnan().item<bool>()) << tensor;
      EXPECT_TRUE(tensor[1].isnan().item<bool>()) << tensor;
      EXPECT_TRUE(tensor.narrow(0, 2, 2).equal(expected.to(type).narrow(0, 2, 2))) << tensor;
    }
  }
}

void check_lists(Communicator& group) {
  const int size = group.size();
  const int rank = group.rank();
  // Three tensors of different shapes in one call.
  std::vector<at::Tensor> list{sample(rank, 5, at::kBFloat16), sample(rank, 0, at::kBFloat16),
                               sample(rank, 12, at::kBFloat16, 1).reshape({3, 4})};
  group.all_reduce(list, ReduceOp::mean).wait();
  EXPECT_TRUE(list[0].equal(expected_reduction(size, 5, at::kBFloat16, ReduceOp::mean)));
  EXPECT_TRUE(
      list[2].flatten().equal(expected_reduction(size, 12, at::kBFloat16, ReduceOp::mean, 1)));

  std::vector<at::Tensor> told{sample(rank, 5, at::kInt), sample(rank, 8, at::kInt, 1)};
  group.broadcast(told, 0).wait();
  EXPECT_TRUE(told[0].equal(sample(0, 5, at::kInt)));
  EXPECT_TRUE(told[1].equal(sample(0, 8, at::kInt, 1)));
}

// Rank r's part has 3r elements, so rank 0 has none.
void check_uneven(Communicator& group) {
  const int size = group.size();
  const int rank = group.rank();
  const auto options = at::TensorOptions().dtype(at::kFloat);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (int peer = 0; peer < size; ++peer) {
    outputs.push_back(at::zeros({3 * peer}, options));
    inputs.push_back(sample(rank, 3 * peer, at::kFloat, peer));
  }
  group.all_gather(outputs, sample(rank, 3 * rank, at::kFloat)).wait();
  for (int peer = 0; peer < size; ++peer)
    EXPECT_TRUE(outputs[static_cast<std::size_t>(peer)].equal(sample(peer, 3 * peer, at::kFloat)));

  at::Tensor mine = at::zeros({3 * rank}, options);
  group.reduce_scatter(mine, inputs).wait();
  EXPECT_TRUE(mine.equal(expected_reduction(size, 3 * rank, at::kFloat, ReduceOp::sum, rank)));

  // Rank a sends a·b + a elements to rank b.
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(sample(rank, rank * peer + rank, at::kHalf, peer));
    received.push_back(at::zeros({peer * rank + peer}, at::TensorOptions().dtype(at::kHalf)));
  }
  group.all_to_all(received, sent).wait();
  for (int peer = 0; peer < size; ++peer)
    EXPECT_TRUE(received[static_cast<std::size_t>(peer)].equal(
        sample(peer, peer * rank + peer, at::kHalf, rank)));
}

// Many calls in flight, waited for in another order; exchanges do not wait for each other.
void check_in_flight(Communicator& group) {
  const int size = group.size();
  const int rank = group.rank();
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(sample(rank, 100 + i, at::kFloat, i));
    works.push_back(group.all_reduce(tensors.back()));
  }
  for (int i = 19; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    works[at].wait_on_host();
    EXPECT_TRUE(works[at].done());
    EXPECT_TRUE(tensors[at].equal(expected_reduction(size, 100 + i, at::kFloat, ReduceOp::sum, i)));
  }
  group.exchange({}).wait();
  if (size == 1) return;
  // The receives are posted first: the first call can only end after the second was made.
  const int right = (rank + 1) % size;
  const int left = (rank + size - 1) % size;
  at::Tensor received = at::zeros({100'000}, at::TensorOptions().dtype(at::kFloat));
  Work receiving = group.exchange({receive_from(left, received)});
  Work sending = group.exchange({send_to(right, sample(rank, 100'000, at::kFloat))});
  sending.wait();
  receiving.wait();
  EXPECT_TRUE(received.equal(sample(left, 100'000, at::kFloat)));
}

}  // namespace

void check_operations(Communicator& group) {
  EXPECT_FALSE(group.canonical_order());
  for (const at::ScalarType type : kTypes)
    for (const std::int64_t length : {0, 1, 1003}) check_type(group, type, length);
  check_type(group, at::kFloat, 1'000'003);
  check_type(group, at::kBFloat16, 1'000'003);
  group.barrier().wait();
}

void check_forms(Communicator& group) {
  check_nans(group);
  check_lists(group);
  check_uneven(group);
  check_in_flight(group);
}

void check_splits(Communicator& group) {
  // Ranks come in reverse order; the last rank is in no group.
  const int last = group.size() - 1;
  const int color = group.rank() == last && last > 0 ? -1 : 4;
  auto part = group.split(color, -group.rank(), "reversed");
  if (color < 0) {
    EXPECT_EQ(part, nullptr);
  } else {
    ASSERT_NE(part, nullptr);
    const int members = std::max(last, 1);
    EXPECT_EQ(part->size(), members);
    EXPECT_EQ(part->rank(), members - 1 - group.rank());
    EXPECT_EQ(part->name(), "reversed");
    for (int i = 0; i < members; ++i)
      EXPECT_EQ(part->global_ranks()[static_cast<std::size_t>(i)],
                group.global_ranks()[static_cast<std::size_t>(members - 1 - i)]);
    check_type(*part, at::kFloat, 100);
  }
  group.barrier().wait();
}

}  // namespace lockstep::comm::backends

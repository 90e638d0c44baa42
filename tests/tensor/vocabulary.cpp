#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

void check_embedding(Cells& cells, std::int64_t rows, const Precision& precision) {
  auto [whole, cut] =
      make_twins([&] { return VocabParallelEmbedding(rows, 6); }, precision.type, axis_of(cells));
  // Uses every row, some of them twice.
  const at::Tensor tokens = (at::arange(2 * rows, at::kLong) * 5).remainder(rows).view({2, rows});
  torch::manual_seed(4);
  const at::Tensor gradient = at::randn({2, rows, 6}, precision.type);
  const at::Tensor wanted = whole->forward(tokens), got = cut->forward(tokens);
  cells.expect_same(got, wanted, "the result");
  wanted.backward(gradient);
  got.backward(gradient);
  expect_same_gradients(cells, *cut, *whole, precision.tolerance);
  cells.expect(cut->weight.size(0) == mesh::part_of(rows, cells.rank(), cells.num_ranks()).size(),
               "another number of rows");
  cells.expect_same(cut->forward(tokens[0]), whole->forward(tokens[0]), "of one sequence");
  for (const std::int64_t nowhere : {rows, std::int64_t{-1}}) {
    bool refused = false;
    try {
      cut->forward(at::full({1, 2}, nowhere, at::kLong));
    } catch (const c10::Error&) {
      refused = true;
    }
    cells.expect(refused, fmt::format("token {} of {} has a row", nowhere, rows));
  }
}

struct LossCase {
  std::int64_t rows = 9;
  std::int64_t vocabulary = 19;  // no multiple of 2, 3 or 4
  double scale = 1.0;
  bool all_ignored = false;
};

void check_loss(Cells& cells, const LossCase& one, const Precision& precision) {
  const std::int64_t width = 5;
  const auto axis = axis_of(cells);
  torch::manual_seed(12);
  const at::Tensor x = at::randn({one.rows, width}, precision.type) * one.scale;
  const at::Tensor all = at::randn({one.vocabulary, width}, precision.type);
  at::Tensor targets = (at::arange(one.rows, at::kLong) * 7).remainder(one.vocabulary);
  targets.index_put_({at::arange(0, one.rows, one.all_ignored ? 1 : 4)},
                     at::scalar_tensor(kIgnoredTarget, at::kLong));
  const auto part = mesh::part_of(one.vocabulary, cells.rank(), cells.num_ranks());
  const at::Tensor whole_x = leaf(x), whole_weight = leaf(all);
  const at::Tensor cut_x = leaf(x), weight = leaf(all.narrow(0, part.begin, part.size()));
  const LossSum wanted = linear_cross_entropy(whole_x, whole_weight, targets);
  const LossSum got =
      vocab_parallel_cross_entropy(enter_products(cut_x, *axis), weight, targets,
                                   {.begin = part.begin, .vocabulary = one.vocabulary}, axis);
  cells.expect(got.count == wanted.count, "another count");
  expect_within(cells, got.sum, wanted.sum, precision.tolerance, "the loss");
  (wanted.sum * 0.5).backward();
  (got.sum * 0.5).backward();
  expect_within(cells, cut_x.grad(), whole_x.grad(), precision.tolerance, "the hidden's gradient");
  expect_within(cells, weight.grad(), whole_weight.grad().narrow(0, part.begin, part.size()),
                precision.tolerance, "the weight's gradient");
  const c10::NoGradGuard no_grad;
  const LossSum evaluated = vocab_parallel_cross_entropy(
      cut_x, weight, targets, {.begin = part.begin, .vocabulary = one.vocabulary}, axis);
  cells.expect_same(evaluated.sum, got.sum.detach(), "without gradients, the loss");
  cells.expect(!evaluated.sum.requires_grad(), "the loss of an evaluation has a gradient");
}

}  // namespace

void check_vocabulary_layers(Cells& cells) {
  for (const Precision& precision : kPrecisions)
    for (const std::int64_t rows : {12, 13, 4})
      cells.cell(fmt::format("embedding of {} rows, {}", rows, c10::toString(precision.type)),
                 [&] { check_embedding(cells, rows, precision); });
}

void check_vocabulary_loss(Cells& cells) {
  const std::pair<const char*, LossCase> cases[] = {
      {"", {}},
      {"an even vocabulary", {.vocabulary = 24}},
      {"a row", {.rows = 2}},
      {"no row that counts", {.all_ignored = true}},
      {"huge logits", {.scale = 1e4}},
      // On each rank, for any number of ranks, there are more than a block of 16 MiB of logits.
      {"blocks of rows", {.rows = 150, .vocabulary = 200'003}}};
  for (const Precision& precision : kPrecisions)
    for (const auto& one : cases)
      cells.cell(fmt::format("loss, {}, {}", one.first, c10::toString(precision.type)),
                 [&] { check_loss(cells, one.second, precision); });
  cells.cell("loss in bfloat16",
             [&] { check_loss(cells, {}, {.type = at::kBFloat16, .tolerance = 2e-2}); });
}

}  // namespace lockstep::nn

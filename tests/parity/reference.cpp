#include "reference.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

namespace lockstep::parity {

std::int64_t Spread::num_samples() const {
  std::int64_t total = 0;
  for (const auto& passes : batches)
    for (const std::int64_t count : passes) total += count;
  return total;
}

std::int64_t Spread::first(int rank, std::int64_t pass) const {
  std::int64_t before = 0;
  for (int other = 0; other <= rank; ++other)
    for (std::int64_t p = 0; p < num_passes(); ++p)
      if (other < rank || p < pass) before += batches[other][p];
  return before;
}

Spread spread_of(const SamplesOf& samples, std::int64_t num_passes, int num_ranks,
                 std::int64_t step) {
  Spread spread;
  for (int rank = 0; rank < num_ranks; ++rank) {
    auto& passes = spread.batches.emplace_back();
    for (std::int64_t pass = 0; pass < num_passes; ++pass)
      passes.push_back(samples(rank, step, pass));
  }
  if (spread.num_samples() == 0) spread.batches[0][0] = 2;
  return spread;
}

void seed_pass(std::int64_t step, int rank, std::int64_t pass) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + 100 * step + 10 * rank + pass));
}

at::Tensor pass_loss(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                     const Spread& spread, int rank, std::int64_t pass, Division division) {
  const std::int64_t first = spread.first(rank, pass);
  const std::int64_t count = spread.batches[rank][pass];
  const at::Tensor sum =
      subject.loss_sum(input.narrow(0, first, count), target.narrow(0, first, count));
  if (division == Division::by_count) return sum;
  std::int64_t samples = 0;
  for (const std::int64_t of_pass : spread.batches[rank]) samples += of_pass;
  return sum / static_cast<double>(samples * subject.per_sample);
}

namespace {

using Tensors = std::vector<at::Tensor>;

// Adds two ranks' gradients; undefined if neither has one.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  return a + b;
}

// The canonical tree over ranks [first, first + count): its left half has the largest power of two
// below the count.
at::Tensor tree_sum(const std::vector<Tensors>& ranks, std::size_t parameter, std::size_t first,
                    std::size_t count) {
  if (count == 1) return ranks[first][parameter];
  std::size_t left = 1;
  while (2 * left < count) left *= 2;
  return sum_of(tree_sum(ranks, parameter, first, left),
                tree_sum(ranks, parameter, first + left, count - left));
}

void restore(const Tensors& to, const Tensors& from) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

}  // namespace

double reference_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                      std::int64_t step, const Spread& spread, Division division, PassOrder order) {
  const Tensors parameters = subject.module->parameters();
  const Tensors buffers = subject.module->buffers();
  const Tensors buffers_before = copies(buffers);
  Tensors buffers_of_first;
  // Of one pass after the other, or of all of them: gradients, indexed by rank.
  const bool by_pass = order == PassOrder::ranks_first;
  std::vector<std::vector<Tensors>> gradients(
      by_pass ? static_cast<std::size_t>(spread.num_passes()) : 1);
  const auto drop_gradients = [&] {
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
  };
  const auto keep_gradients = [&](std::size_t pass) {
    Tensors& of_rank = gradients[pass].emplace_back();
    for (const at::Tensor& parameter : parameters) of_rank.push_back(parameter.grad());
  };
  double losses = 0;
  for (int rank = 0; rank < spread.num_ranks(); ++rank) {
    restore(buffers, buffers_before);
    drop_gradients();
    for (std::int64_t pass = 0; pass < spread.num_passes(); ++pass) {
      if (by_pass && pass > 0) {
        keep_gradients(static_cast<std::size_t>(pass - 1));
        drop_gradients();
      }
      if (spread.batches[rank][pass] == 0) continue;
      seed_pass(step, rank, pass);
      const at::Tensor loss = pass_loss(subject, input, target, spread, rank, pass, division);
      losses += loss.item<double>();
      loss.backward();
      // LibTorch adds a second pass's gradients twice if the first pass's share memory.
      for (const at::Tensor& parameter : parameters)
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().clone();
    }
    keep_gradients(gradients.size() - 1);
    if (rank == 0) buffers_of_first = copies(buffers);
  }
  restore(buffers, buffers_of_first);
  const auto divisor = division == Division::by_count
                           ? static_cast<double>(spread.num_samples() * subject.per_sample)
                           : static_cast<double>(spread.num_ranks());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor sum;
    for (const std::vector<Tensors>& of_ranks : gradients)
      sum = sum_of(sum, tree_sum(of_ranks, i, 0, of_ranks.size()));
    parameters[i].mutable_grad() = sum.defined() ? sum / at::full({}, divisor, sum.options()) : sum;
  }
  return losses;
}

double whole_batch_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target) {
  for (const at::Tensor& parameter : subject.module->parameters())
    parameter.mutable_grad() = at::Tensor();
  const auto count = static_cast<double>(input.size(0) * subject.per_sample);
  const at::Tensor loss = subject.loss_sum(input, target) / count;
  loss.backward();
  return loss.item<double>();
}

}  // namespace lockstep::parity

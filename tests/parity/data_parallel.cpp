#include "data_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include "reference.h"
#include "subject.h"

namespace lockstep::parity {

namespace {

using ranks::Cells;
using replicate::DistributedDataParallel;

// How the user zeroes gradients between steps.
enum class Zeroing { drop, in_place };

struct ReplicatedWay {
  std::string name;
  Division division;
  SamplesOf samples;
  std::int64_t num_passes = 1;
  replicate::Options options;
  Zeroing zeroing = Zeroing::drop;
};

std::vector<ReplicatedWay> ways(Usage usage) {
  const auto four = [](int, std::int64_t, std::int64_t) { return std::int64_t{4}; };
  // In some passes a rank has no samples.
  const auto uneven = [](int rank, std::int64_t step, std::int64_t pass) {
    return (rank + step + 2 * pass) % 3 * 2;
  };
  const replicate::Options tiny_buckets = {.buckets = {.first_bytes = 64, .bytes = 700}};
  std::vector<ReplicatedWay> all = {
      {"mean", Division::by_ranks, four},
      {"mean, tiny buckets", Division::by_ranks, four, 1, tiny_buckets},
      {"accumulation", Division::by_ranks, four, 3, tiny_buckets},
      {"by count", Division::by_count, four},
      {"uneven batches", Division::by_count, uneven, 1, tiny_buckets},
      {"uneven accumulation", Division::by_count, uneven, 2},
  };
  if (usage == Usage::full) {
    replicate::Options strict;
    strict.find_unused_parameters = false;
    all.push_back({"no detection of unused", Division::by_ranks, four, 1, strict});
    for (const Division division : {Division::by_ranks, Division::by_count})
      all.push_back({"gradients zeroed in place", division, four, 2, {}, Zeroing::in_place});
  }
  return all;
}

void drop_gradients(const torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

torch::optim::SGD sgd(const Subject& subject) {
  return torch::optim::SGD(subject.module->parameters(),
                           torch::optim::SGDOptions(0.05).momentum(0.9));
}

// Makes one step of this rank. Returns the sum of the losses from which all ranks' passes started.
double distributed_step(Cells& cells, const Subject& subject, DistributedDataParallel& parallel,
                        const at::Tensor& input, const at::Tensor& target, std::int64_t step,
                        const Spread& spread, Division division) {
  const int rank = cells.rank();
  const at::Tensor losses = at::zeros({}, at::kDouble);
  for (std::int64_t pass = 0; pass < spread.num_passes(); ++pass) {
    const bool last = pass + 1 == spread.num_passes();
    const std::int64_t count = spread.batches[rank][pass];
    seed_pass(step, rank, pass);
    at::Tensor loss;
    if (count > 0) {
      loss = pass_loss(subject, input, target, spread, rank, pass, division);
      losses.add_(loss.detach());
    }
    const auto run = [&] {
      if (division == Division::by_count)
        parallel.backward(loss, count * subject.per_sample);
      else
        loss.backward();
    };
    if (last) {
      run();
    } else {
      const auto guard = parallel.no_sync();
      run();
    }
  }
  cells.group()->all_reduce(losses).wait();
  return losses.item<double>();
}

void expect_loss(Cells& cells, double got, double wanted, std::int64_t step) {
  cells.expect(std::abs(got - wanted) <= 1e-12 * std::abs(wanted),
               fmt::format("step {}: the loss is {}, one process's is {}", step, got, wanted));
}

void compare(Cells& cells, const torch::nn::Module& got, const torch::nn::Module& wanted,
             std::int64_t step) {
  const auto parameters = got.named_parameters();
  const auto expected = wanted.named_parameters();
  for (const auto& item : parameters) {
    const at::Tensor& reference = expected[item.key()];
    cells.expect_same(item.value().grad(), reference.grad(),
                      fmt::format("step {}: the gradient of {}", step, item.key()));
    cells.expect_same(item.value(), reference, fmt::format("step {}: {}", step, item.key()));
  }
  const auto buffers = wanted.named_buffers();
  for (const auto& item : got.named_buffers())
    cells.expect_same(item.value(), buffers[item.key()],
                      fmt::format("step {}: the buffer {}", step, item.key()));
}

void run_cell(Cells& cells, const SubjectKind& kind, const ReplicatedWay& way) {
  const int num_ranks = cells.num_ranks();
  // Ranks other than the first start with other weights, which rank 0's replace.
  torch::manual_seed(static_cast<std::uint64_t>(7 + cells.rank()));
  const Subject subject = kind.make();
  torch::manual_seed(7);
  const Subject reference = kind.make();
  DistributedDataParallel parallel(*subject.module, cells.group(), way.options);
  torch::optim::SGD optimizer = sgd(subject);
  torch::optim::SGD reference_optimizer = sgd(reference);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const Spread spread = spread_of(way.samples, way.num_passes, num_ranks, step);
    torch::manual_seed(static_cast<std::uint64_t>(100 + step));
    const auto [input, target] = reference.make_batch(spread.num_samples());

    for (at::Tensor& parameter : subject.module->parameters()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (way.zeroing == Zeroing::in_place && gradient.defined())
        gradient.zero_();
      else
        gradient = at::Tensor();
    }
    const double sum =
        distributed_step(cells, subject, parallel, input, target, step, spread, way.division);
    if (kind.samples == Samples::independent) {
      whole_batch_step(reference, input, target);
      if (way.division == Division::by_count || step == 0)
        for (const auto& item : subject.module->named_parameters())
          cells.expect_close(item.value().grad(),
                             reference.module->named_parameters()[item.key()].grad(),
                             fmt::format("step {}: the gradient of {}", step, item.key()));
    }
    const double losses = reference_step(reference, input, target, step, spread, way.division);
    expect_loss(cells, sum, losses, step);
    if (way.division == Division::by_count) {
      const double count = static_cast<double>(spread.num_samples() * subject.per_sample);
      cells.expect(parallel.totals().count() == count, "the count of all ranks is wrong");
      expect_loss(cells, parallel.totals().mean_loss(), losses / count, step);
    }
    optimizer.step();
    reference_optimizer.step();
    compare(cells, *subject.module, *reference.module, step);
  }
}

// How the samples of a step are spread if batch norms are synchronised: every rank has some.
struct NormSpread {
  std::string name;
  std::function<std::int64_t(int rank, int num_ranks, std::int64_t step)> samples;
};

const std::vector<NormSpread>& norm_spreads() {
  static const std::vector<NormSpread> all = {
      {"even", [](int, int, std::int64_t) { return 4; }},
      {"uneven", [](int rank, int, std::int64_t step) { return 2 + (rank + step) % 3; }},
      {"one sample on a rank",
       [](int rank, int num_ranks, std::int64_t step) {
         return num_ranks > 1 && rank == step % num_ranks ? 1 : 3;
       }},
      {"one sample on every rank",
       [](int, int num_ranks, std::int64_t) { return num_ranks > 1 ? 1 : 2; }},
  };
  return all;
}

at::Tensor exact(const at::Tensor& tensor) {
  return tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor;
}

// With global statistics, a batch norm gives the result of the whole batch in one piece. The type
// is float64, because with two samples most of a float32 result would be rounding.
void check_sync_batch_norm(Cells& cells, const SubjectKind& kind, const NormSpread& norm_spread) {
  torch::manual_seed(7);
  const Subject subject = kind.make();
  torch::manual_seed(7);
  const Subject reference = kind.make();
  subject.module->to(at::kDouble);
  reference.module->to(at::kDouble);
  const replicate::SyncBatchNorm synced(*subject.module, *cells.group());
  cells.expect(synced.num_converted() == kind.num_batch_norms, "not every one was converted");
  DistributedDataParallel parallel(*subject.module, cells.group());
  torch::optim::SGD optimizer = sgd(subject);
  torch::optim::SGD reference_optimizer = sgd(reference);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    Spread spread;
    for (int rank = 0; rank < cells.num_ranks(); ++rank)
      spread.batches.push_back({norm_spread.samples(rank, cells.num_ranks(), step)});
    torch::manual_seed(static_cast<std::uint64_t>(100 + step));
    auto [input, target] = reference.make_batch(spread.num_samples());
    input = exact(input);
    target = exact(target);
    drop_gradients(*subject.module);
    distributed_step(cells, subject, parallel, input, target, step, spread, Division::by_count);
    const double loss = whole_batch_step(reference, input, target);
    cells.expect(std::abs(parallel.totals().mean_loss() - loss) < 1e-9 * std::abs(loss),
                 fmt::format("step {}: the loss is {}, one process's is {}", step,
                             parallel.totals().mean_loss(), loss));
    const auto close = [&](const at::Tensor& got, const at::Tensor& wanted,
                           const std::string& what) {
      cells.expect(at::allclose(got, wanted, 1e-9, 1e-10),
                   fmt::format("step {}: {} is off by up to {}", step, what,
                               (got - wanted).abs().max().item<double>()));
    };
    optimizer.step();
    reference_optimizer.step();
    for (const auto& item : subject.module->named_parameters()) {
      const at::Tensor& wanted = reference.module->named_parameters()[item.key()];
      close(item.value().grad(), wanted.grad(), "the gradient of " + item.key());
      close(item.value(), wanted, item.key());
    }
    for (const auto& item : subject.module->named_buffers())
      close(item.value(), reference.module->named_buffers()[item.key()],
            "the buffer " + item.key());
  }
  // In evaluation a rank needs no partners.
  subject.module->eval();
  reference.module->eval();
  const c10::NoGradGuard no_grad;
  const auto [input, target] = reference.make_batch(3);
  if (cells.rank() == 0)
    cells.expect_close(subject.loss_sum(exact(input), exact(target)),
                       reference.loss_sum(exact(input), exact(target)), "the loss in evaluation");
}

}  // namespace

void check_data_parallel(Cells& cells) {
  for (const SubjectKind& kind : subject_kinds())
    for (const ReplicatedWay& way : ways(kind.usage))
      cells.cell(fmt::format("data parallel, {}, {}", kind.name, way.name),
                 [&] { run_cell(cells, kind, way); });
  for (const SubjectKind& kind : subject_kinds())
    for (const NormSpread& spread : norm_spreads())
      if (kind.num_batch_norms > 0)
        cells.cell(fmt::format("synchronised batch norm, {}, {}", kind.name, spread.name),
                   [&] { check_sync_batch_norm(cells, kind, spread); });
}

}  // namespace lockstep::parity

#include "data_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include "reference.h"
#include "references.h"
#include "subject.h"

namespace lockstep::parity {

namespace {

using ranks::Cells;
using replicate::DistributedDataParallel;

// What the user does to gradients between steps.
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
  // In some passes a rank has none.
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

// One step of this rank. Returns the losses that all ranks' passes started from, summed.
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

struct ReplicatedCell {
  const SubjectKind* kind;
  ReplicatedWay way;
  int num_ranks;

  std::string name() const { return fmt::format("data parallel, {}, {}", kind->name, way.name); }
  Spread spread(std::int64_t step) const {
    return spread_of(way.samples, way.num_passes, num_ranks, step);
  }
  // All that one process's numbers depend on.
  std::string reference() const {
    std::string key = kind->name;
    key += way.division == Division::by_count ? ", by count" : ", by ranks";
    for (std::int64_t step = 0; step < kSteps; ++step)
      for (const auto& passes : spread(step).batches)
        key += fmt::format(" {}", fmt::join(passes, "+"));
    return key;
  }
  std::pair<at::Tensor, at::Tensor> batch(const Subject& subject, std::int64_t step) const {
    torch::manual_seed(static_cast<std::uint64_t>(100 + step));
    return subject.make_batch(spread(step).num_samples());
  }
  // Whether the whole batch in one pass has the gradients that come of the ranks' shares.
  bool is_like_the_whole_batch(std::int64_t step) const {
    return kind->samples == Samples::independent &&
           (way.division == Division::by_count || step == 0);
  }
};

// Where the values of one process are among its others.
std::string gradient_of(std::int64_t step, const std::string& name) {
  return fmt::format("step {}: the gradient of {}", step, name);
}
std::string value_of(std::int64_t step, const std::string& name) {
  return fmt::format("step {}: {}", step, name);
}
const std::string kOfTheWholeBatch = "of the whole batch, ";

Values run_in_one_process(const ReplicatedCell& cell) {
  torch::manual_seed(7);
  const Subject reference = cell.kind->make();
  torch::optim::SGD optimizer = sgd(reference);
  Values values;
  const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
    values[name] = tensor.defined() ? tensor.detach().clone() : tensor;
  };
  const auto parameters = reference.module->named_parameters();
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto [input, target] = cell.batch(reference, step);
    if (cell.is_like_the_whole_batch(step)) {
      whole_batch_step(reference, input, target);
      for (const auto& item : parameters)
        keep(kOfTheWholeBatch + gradient_of(step, item.key()), item.value().grad());
    }
    const double losses =
        reference_step(reference, input, target, step, cell.spread(step), cell.way.division);
    keep(value_of(step, "loss"), at::scalar_tensor(losses, at::kDouble));
    for (const auto& item : parameters) keep(gradient_of(step, item.key()), item.value().grad());
    optimizer.step();
    for (const auto& item : parameters) keep(value_of(step, item.key()), item.value());
    for (const auto& item : reference.module->named_buffers())
      keep(value_of(step, item.key()), item.value());
  }
  return values;
}

void run_cell(Cells& cells, const ReplicatedCell& cell, const Values& reference) {
  const ReplicatedWay& way = cell.way;
  // Ranks other than the first start from other weights, which rank 0's replace.
  torch::manual_seed(static_cast<std::uint64_t>(7 + cells.rank()));
  const Subject subject = cell.kind->make();
  DistributedDataParallel parallel(*subject.module, cells.group(), way.options);
  torch::optim::SGD optimizer = sgd(subject);
  const auto expect_same = [&](const at::Tensor& got, const std::string& name) {
    cells.expect_same(got, reference.at(name), name);
  };
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const Spread spread = cell.spread(step);
    const auto [input, target] = cell.batch(subject, step);

    for (at::Tensor& parameter : subject.module->parameters()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (way.zeroing == Zeroing::in_place && gradient.defined())
        gradient.zero_();
      else
        gradient = at::Tensor();
    }
    const double sum =
        distributed_step(cells, subject, parallel, input, target, step, spread, way.division);
    if (cell.is_like_the_whole_batch(step))
      for (const auto& item : subject.module->named_parameters()) {
        const std::string name = gradient_of(step, item.key());
        cells.expect_close(item.value().grad(), reference.at(kOfTheWholeBatch + name), name);
      }
    const double losses = reference.at(value_of(step, "loss")).item<double>();
    expect_loss(cells, sum, losses, step);
    if (way.division == Division::by_count) {
      const double count = static_cast<double>(spread.num_samples() * subject.per_sample);
      cells.expect(parallel.totals().count() == count, "the count of all ranks is wrong");
      expect_loss(cells, parallel.totals().mean_loss(), losses / count, step);
    }
    optimizer.step();
    for (const auto& item : subject.module->named_parameters()) {
      expect_same(item.value().grad(), gradient_of(step, item.key()));
      expect_same(item.value(), value_of(step, item.key()));
    }
    for (const auto& item : subject.module->named_buffers())
      expect_same(item.value(), value_of(step, item.key()));
  }
}

// How the samples of a step are spread where batch norms are synchronised: every rank has some.
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

// With global statistics a batch norm's answer is that of the whole batch in one piece. In float64,
// since what two samples' statistics leave is mostly rounding.
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
  // Evaluation has no partners.
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
  std::vector<ReplicatedCell> all;
  References references;
  for (const SubjectKind& kind : subject_kinds())
    for (const ReplicatedWay& way : ways(kind.usage)) {
      const ReplicatedCell cell{&kind, way, cells.num_ranks()};
      if (!cells.runs(cell.name())) continue;
      references.add(cell.reference(), [cell] { return run_in_one_process(cell); });
      all.push_back(cell);
    }
  references.compute(*cells.group(), at::kCPU);
  for (const ReplicatedCell& cell : all)
    cells.cell(cell.name(), [&] { run_cell(cells, cell, references.of(cell.reference())); });
  for (const SubjectKind& kind : subject_kinds())
    for (const NormSpread& spread : norm_spreads())
      if (kind.num_batch_norms > 0)
        cells.cell(fmt::format("synchronised batch norm, {}, {}", kind.name, spread.name),
                   [&] { check_sync_batch_norm(cells, kind, spread); });
}

}  // namespace lockstep::parity

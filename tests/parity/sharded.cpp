#include "sharded.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/optim/clip.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include "reference.h"
#include "references.h"
#include "share.h"
#include "subject.h"

namespace lockstep::parity {

namespace {

using ranks::Cells;

constexpr double kWeightDecay = 0.1;

// A subject made parallel, whichever way.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual void backward(const at::Tensor& loss, std::int64_t count) = 0;  // a summed loss
  virtual data_parallel::NoSync no_sync() = 0;
  virtual data_parallel::Accumulation accumulate() = 0;
  virtual void add_passes(PassOrder order) = 0;
  virtual std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) = 0;
  virtual optim::ClipResult clip(double max_norm) = 0;
  virtual at::Tensor gradient(const std::string& name) = 0;
  virtual std::vector<NamedTensor> weights() = 0;
};

// ZeRO-1.
class Zero1 final : public Parallel {
 public:
  Zero1(torch::nn::Module& module, const std::shared_ptr<comm::Communicator>& group)
      : module_(module), shards_(module, group), replicas_(module, group) {}

  void backward(const at::Tensor& loss, std::int64_t count) override {
    replicas_.backward(loss, count);
  }
  data_parallel::NoSync no_sync() override { return replicas_.no_sync(); }
  data_parallel::Accumulation accumulate() override { return replicas_.accumulate(); }
  void add_passes(PassOrder order) override {
    replicas_.exchange_each_pass(order == PassOrder::ranks_first);
  }
  std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return shards_.make_optimizer(options, std::move(groups));
  }
  optim::ClipResult clip(double max_norm) override {
    return optim::clip_gradients(data_parallel::trained_parameters(module_), max_norm);
  }
  at::Tensor gradient(const std::string& name) override {
    return module_.named_parameters()[name].grad();
  }
  std::vector<NamedTensor> weights() override {
    std::vector<NamedTensor> all = data_parallel::distinct_tensors(module_.named_parameters());
    for (NamedTensor& buffer : data_parallel::distinct_tensors(module_.named_buffers()))
      all.push_back(std::move(buffer));
    return all;
  }

 private:
  torch::nn::Module& module_;
  shard::OptimizerShards shards_;
  replicate::DistributedDataParallel replicas_;
};

// ZeRO-2 and 3.
class Sharded final : public Parallel {
 public:
  Sharded(torch::nn::Module& module, shard::Groups groups, shard::Options options)
      : sharded_(module, std::move(groups), std::move(options)) {}

  void backward(const at::Tensor& loss, std::int64_t count) override {
    sharded_.backward(loss, count);
  }
  data_parallel::NoSync no_sync() override { return sharded_.no_sync(); }
  data_parallel::Accumulation accumulate() override { return sharded_.accumulate(); }
  void add_passes(PassOrder order) override {
    sharded_.exchange_each_pass(order == PassOrder::ranks_first);
  }
  std::unique_ptr<optim::Optimizer> make_optimizer(
      const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) override {
    return sharded_.make_optimizer(options, std::move(groups));
  }
  optim::ClipResult clip(double max_norm) override { return sharded_.clip_gradients(max_norm); }
  at::Tensor gradient(const std::string& name) override { return sharded_.full_gradient(name); }
  std::vector<NamedTensor> weights() override {
    return sharded_.full_state_dict({.rank0_only = false});
  }

 private:
  shard::FullyShardedDataParallel sharded_;
};

struct Strategy {
  std::string name;
  std::function<std::unique_ptr<Parallel>(Cells& cells, torch::nn::Module& module,
                                          const SubjectKind& kind)>
      wrap;
  // Whether a rank may sit a pass out.
  bool idle_ranks = false;
  // Whether it is another strategy on GPUs alone.
  bool offloads = false;
};

shard::Options options_for(const SubjectKind& kind, shard::Cut cut, std::size_t max_live_units,
                           const shard::CPUOffload& offload = {}) {
  return {.cut = cut,
          // Where ranks take different branches, whatever one of them uses has to come for all.
          .units = kind.usage == Usage::partial ? shard::one_unit() : shard::UnitPolicy(),
          .cpu_offload = offload,
          .max_live_units = max_live_units,
          .scrub_freed_memory = true};
}

Strategy sharded(const std::string& name, shard::Cut cut, std::size_t max_live_units,
                 const shard::CPUOffload& offload = {}) {
  return {.name = name,
          .wrap =
              [=](Cells& cells, torch::nn::Module& module, const SubjectKind& kind) {
                return std::make_unique<Sharded>(module, shard::shard_over(cells.group()),
                                                 options_for(kind, cut, max_live_units, offload));
              },
          .idle_ranks = cut == shard::Cut::gradients,
          .offloads = offload.offload_optimizer};
}

// Neighbours share a copy.
Strategy hybrid(int ranks_per_copy) {
  return {.name = fmt::format("HYBRID_SHARD, {} to a copy", ranks_per_copy),
          .wrap = [=](Cells& cells, torch::nn::Module& module, const SubjectKind& kind) {
            const auto& all = cells.group();
            const auto shard = all->split(all->rank() / ranks_per_copy, all->rank(), "shard");
            const auto replicas = all->split(all->rank() % ranks_per_copy, all->rank(), "replicas");
            return std::make_unique<Sharded>(
                module, shard::shard_over(all, shard, replicas),
                options_for(kind, shard::Cut::gradients_and_parameters, 2));
          }};
}

std::vector<Strategy> strategies(int num_ranks) {
  std::vector<Strategy> all = {
      {.name = "ZeRO-1",
       .wrap = [](Cells& cells, torch::nn::Module& module,
                  const SubjectKind&) { return std::make_unique<Zero1>(module, cells.group()); },
       .idle_ranks = true},
      sharded("SHARD_GRAD_OP", shard::Cut::gradients, 2),
      sharded("FULL_SHARD", shard::Cut::gradients_and_parameters, 2),
      sharded("FULL_SHARD, one unit at a time", shard::Cut::gradients_and_parameters, 1),
      // On a CPU all of it is in the host's memory to begin with.
      sharded("SHARD_GRAD_OP, optimizer offloaded", shard::Cut::gradients, 2,
              {.offload_optimizer = true}),
      sharded("FULL_SHARD, all offloaded", shard::Cut::gradients_and_parameters, 2,
              {.offload_optimizer = true, .offload_params = true}),
  };
  if (num_ranks == 4) all.push_back(hybrid(2));
  return all;
}

struct ShardedWay {
  std::string name;
  Division division;
  SamplesOf samples;
  std::int64_t num_passes = 1;
  double max_norm = 0;  // 0: no clipping
  bool needs_idle_ranks = false;
  bool recomputes = false;
  PassOrder order = PassOrder::passes_first;
};

const std::vector<ShardedWay>& ways() {
  const auto four = [](int, std::int64_t, std::int64_t) { return std::int64_t{4}; };
  const auto some = [](int rank, std::int64_t step, std::int64_t pass) {
    return 2 + (rank + step + 2 * pass) % 3;
  };
  const auto uneven = [](int rank, std::int64_t step, std::int64_t pass) {
    return (rank + step + 2 * pass) % 3 * 2;
  };
  static const std::vector<ShardedWay> all = {
      {"mean", Division::by_ranks, four},
      {"accumulation, clipping", Division::by_ranks, four, 3, 0.01},
      {"by count, clipping", Division::by_count, some, 1, 0.01},
      {.name = "uneven accumulation",
       .division = Division::by_count,
       .samples = some,
       .num_passes = 3,
       .order = PassOrder::ranks_first},
      {"accumulation, recomputed", Division::by_count, four, 2, 0, false, true},
      {.name = "ranks without samples",
       .division = Division::by_count,
       .samples = uneven,
       .num_passes = 2,
       .needs_idle_ranks = true,
       .order = PassOrder::ranks_first},
  };
  return all;
}

double distributed_step(Cells& cells, const Subject& subject, Parallel& parallel,
                        const at::Tensor& input, const at::Tensor& target, std::int64_t step,
                        const Spread& spread, Division division) {
  const int rank = cells.rank();
  const at::Tensor losses = at::zeros({}, at::kDouble);
  for (std::int64_t pass = 0; pass < spread.num_passes(); ++pass) {
    const std::int64_t count = spread.batches[rank][pass];
    seed_pass(step, rank, pass);
    at::Tensor loss;
    if (count > 0) {
      loss = pass_loss(subject, input, target, spread, rank, pass, division);
      losses.add_(loss.detach().cpu());
    }
    const bool last = pass + 1 == spread.num_passes();
    std::optional<data_parallel::NoSync> local;
    std::optional<data_parallel::Accumulation> more;
    if (!last && division == Division::by_count) more.emplace(parallel.accumulate());
    if (!last && division == Division::by_ranks) local.emplace(parallel.no_sync());
    if (division == Division::by_count)
      parallel.backward(loss, count * subject.per_sample);
    else
      loss.backward();
  }
  const at::Tensor sum = losses.to(input.device());
  cells.group()->all_reduce(sum).wait();
  return sum.item<double>();
}

std::vector<optim::ParameterGroup> decaying(const Subject& subject) {
  return optim::decay_groups(data_parallel::trained_parameters(*subject.module), kWeightDecay);
}

// A batch on a device.
std::pair<at::Tensor, at::Tensor> batch_of(const Subject& subject, std::int64_t num_samples,
                                           c10::Device device) {
  const auto [input, target] = subject.make_batch(num_samples);
  return {input.to(device), target.to(device)};
}

// What the reference's optimizer steps on: its parameters, or copies of them on the host, where
// rounding is another.
class SteppedOn {
 public:
  SteppedOn(const Subject& reference, bool on_host)
      : parameters_(data_parallel::trained_parameters(*reference.module)), tensors_(parameters_) {
    if (!on_host) return;
    for (NamedTensor& one : tensors_) one.tensor = one.tensor.detach().cpu();
  }

  const std::vector<NamedTensor>& tensors() const { return tensors_; }

  void take_gradients() {
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (!tensors_[i].tensor.is_same(parameters_[i].tensor)) {
        const at::Tensor& gradient = parameters_[i].tensor.grad();
        tensors_[i].tensor.mutable_grad() = gradient.defined() ? gradient.cpu() : gradient;
      }
  }

  void give_values() {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (!tensors_[i].tensor.is_same(parameters_[i].tensor))
        parameters_[i].tensor.copy_(tensors_[i].tensor);
  }

 private:
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> tensors_;
};

constexpr double kLearningRate = 0.01;

// Where the values of one process are among its others.
std::string of_step(std::int64_t step, const std::string& what) {
  return fmt::format("step {}: {}", step, what);
}

struct ShardedCell {
  const Strategy* strategy;
  const SubjectKind* kind;
  const ShardedWay* way;
  const optim::OptimizerType* optimizer;
  c10::Device device;
  int num_ranks;

  std::string name() const {
    return fmt::format("{}, {}, {}, {}", strategy->name, kind->name, way->name,
                       optimizer->names.front());
  }
  bool steps_on_host() const { return strategy->offloads && !device.is_cpu(); }
  // All that one process's numbers depend on.
  std::string reference() const {
    return fmt::format("{}, {}, {}{}", kind->name, way->name, optimizer->names.front(),
                       steps_on_host() ? ", stepped on the host" : "");
  }
  Spread spread(std::int64_t step) const {
    return spread_of(way->samples, way->num_passes, num_ranks, step);
  }
  // The batch of a step; after the last of them, one to evaluate.
  std::pair<at::Tensor, at::Tensor> batch(const Subject& subject, std::int64_t step) const {
    torch::manual_seed(static_cast<std::uint64_t>(100 + step));
    return batch_of(subject, step < kSteps ? spread(step).num_samples() : 3, device);
  }
};

Values run_in_one_process(const ShardedCell& cell) {
  torch::manual_seed(7);
  const Subject reference = cell.kind->make();
  reference.module->to(cell.device);
  SteppedOn stepped_on(reference, cell.steps_on_host());
  // Matrices are computed where the model is, also of what is offloaded.
  const auto optimizer = optim::make_optimizer(
      cell.optimizer->options, optim::decay_groups(stepped_on.tensors(), kWeightDecay),
      std::make_shared<optim::WholeParts>(cell.device));
  Values values;
  const auto keep = [&](std::int64_t step, const std::string& what, const at::Tensor& tensor) {
    values[of_step(step, what)] = tensor.defined() ? tensor.detach().cpu().clone() : tensor;
  };
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto [input, target] = cell.batch(reference, step);
    const double losses = reference_step(reference, input, target, step, cell.spread(step),
                                         cell.way->division, cell.way->order);
    keep(step, "loss", at::scalar_tensor(losses, at::kDouble));
    stepped_on.take_gradients();
    if (cell.way->max_norm > 0) {
      const auto clip = optim::clip_gradients(stepped_on.tensors(), cell.way->max_norm);
      keep(step, "norm", at::scalar_tensor(clip.norm, at::kDouble));
      keep(step, "clipped", at::scalar_tensor(clip.clipped ? 1.0 : 0.0, at::kDouble));
    }
    for (const auto& [name, parameter] : stepped_on.tensors())
      keep(step, "the gradient of " + name, parameter.grad());
    optimizer->step(kLearningRate);
    stepped_on.give_values();
    for (const auto& item : reference.module->named_parameters())
      keep(step, item.key(), item.value());
    for (const auto& item : reference.module->named_buffers()) keep(step, item.key(), item.value());
  }
  const c10::NoGradGuard no_grad;
  reference.module->eval();
  const auto [input, target] = cell.batch(reference, kSteps);
  keep(kSteps, "evaluation", reference.loss_sum(input, target));
  return values;
}

void run_cell(Cells& cells, const ShardedCell& cell, const Values& reference) {
  // Ranks other than the first start from other weights, which rank 0's replace.
  torch::manual_seed(static_cast<std::uint64_t>(7 + cells.rank()));
  const Subject subject = cell.kind->make();
  const ShardedWay& way = *cell.way;
  subject.module->to(cell.device);
  if (way.recomputes) SelectiveGradientCheckpointing(*subject.module, 1);
  std::vector<std::string> trained;
  for (const NamedTensor& one : data_parallel::trained_parameters(*subject.module))
    trained.push_back(one.name);
  const auto parallel = cell.strategy->wrap(cells, *subject.module, *cell.kind);
  parallel->add_passes(way.order);
  const auto optimizer = parallel->make_optimizer(cell.optimizer->options, decaying(subject));
  const auto wanted = [&](std::int64_t step, const std::string& what) {
    return reference.at(of_step(step, what));
  };
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto [input, target] = cell.batch(subject, step);
    optimizer->zero_grad();
    const double sum = distributed_step(cells, subject, *parallel, input, target, step,
                                        cell.spread(step), way.division);
    const double losses = wanted(step, "loss").item<double>();
    cells.expect(std::abs(sum - losses) <= 1e-12 * std::abs(losses),
                 fmt::format("step {}: the loss is {}, one process's is {}", step, sum, losses));
    if (way.max_norm > 0) {
      const auto got = parallel->clip(way.max_norm);
      const double norm = wanted(step, "norm").item<double>();
      const bool clipped = wanted(step, "clipped").item<double>() != 0;
      cells.expect(
          got.norm == norm && got.clipped == clipped,
          fmt::format("step {}: the norm is {}, one process's is {}", step, got.norm, norm));
      cells.expect(clipped, "the test's own limit is too high");
    }
    for (const std::string& name : trained)
      cells.expect_same(parallel->gradient(name), wanted(step, "the gradient of " + name),
                        of_step(step, "the gradient of " + name));
    optimizer->step(kLearningRate);
    for (const auto& [name, tensor] : parallel->weights())
      cells.expect_same(tensor, wanted(step, name), of_step(step, name));
  }
  // Evaluation, on weights that are the same.
  const c10::NoGradGuard no_grad;
  subject.module->eval();
  const auto [input, target] = cell.batch(subject, kSteps);
  cells.expect_same(subject.loss_sum(input, target), wanted(kSteps, "evaluation"),
                    "the loss in evaluation");
}

bool is_everyday(const Strategy& strategy, const ShardedWay& way, int num_ranks,
                 c10::Device device) {
  if (strategy.offloads && device.is_cpu()) return false;
  return num_ranks <= 2 || way.recomputes || way.name == "uneven accumulation" ||
         way.name == "by count, clipping";
}

void check_share(Cells& cells, Share share, c10::Device device = at::kCPU) {
  std::vector<optim::OptimizerType> optimizers = optim::optimizer_types();
  // Moments in blocks are computed on the CPU alone.
  if (!device.is_cpu())
    std::erase_if(optimizers, [](const optim::OptimizerType& type) {
      return type.options.kind() == optim::StepKind::blocks;
    });
  const std::vector<Strategy> all_strategies = strategies(cells.num_ranks());
  std::vector<ShardedCell> all;
  References references;
  int number = 0;
  std::size_t turn = 0;
  for (const Strategy& strategy : all_strategies)
    for (const SubjectKind& kind : subject_kinds())
      for (const ShardedWay& way : ways())
        if ((!way.needs_idle_ranks || strategy.idle_ranks) &&
            (!way.recomputes || kind.recomputable) &&
            (share == Share::whole || is_everyday(strategy, way, cells.num_ranks(), device)) &&
            (share != Share::few || number++ % 3 == 0)) {
          // All of them in turn where the way is one of the everyday's, otherwise the first, AdamW.
          const bool takes_turns = way.name == "by count, clipping";
          const auto& optimizer = optimizers[takes_turns ? turn++ % optimizers.size() : 0];
          const ShardedCell cell{&strategy, &kind, &way, &optimizer, device, cells.num_ranks()};
          if (!cells.runs(cell.name())) continue;
          references.add(cell.reference(), [cell] { return run_in_one_process(cell); });
          all.push_back(cell);
        }
  references.compute(*cells.group(), device);
  for (const ShardedCell& cell : all)
    cells.cell(cell.name(), [&] { run_cell(cells, cell, references.of(cell.reference())); });
}

}  // namespace

void check_sharded(Cells& cells) { check_share(cells, Share::whole); }
void check_some_sharded(Cells& cells) { check_share(cells, Share::everyday); }
void check_few_sharded(Cells& cells) { check_share(cells, Share::few); }
void check_sharded_on_gpu(Cells& cells) {
  // Every rank the same one: there may be no other.
  check_share(cells, Share::everyday, c10::Device(at::kCUDA, 0));
}

}  // namespace lockstep::parity

#include <lockstep/train/module_pipeline.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/device/autocast.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/parallel/pipeline/messages.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/preflight/pipeline_plan.h>

namespace lockstep::train {

namespace {

using pipeline::Cuts;
using pipeline::ModelBlock;

// Whether a rank that has it has something to train.
bool is_trained(const ModelBlock& block) {
  return std::ranges::any_of(block.modules, [](const auto& module) {
    return module != nullptr && std::ranges::any_of(module->parameters(), [](const auto& one) {
             return one.requires_grad();
           });
  });
}

// Where the config says how many blocks each stage has.
Cuts given_cuts(const std::vector<std::int64_t>& sizes, const std::vector<ModelBlock>& blocks,
                int num_stages) {
  if (sizes.size() != static_cast<std::size_t>(num_stages))
    throw UsageError("parallel.stage_layers has {} numbers, and the schedule has {} stages: give "
                     "one for each",
                     sizes.size(), num_stages);
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (total != static_cast<std::int64_t>(blocks.size()))
    throw UsageError("parallel.stage_layers is [{}], which is {} blocks, and the model has {}: "
                     "make them add up",
                     fmt::join(sizes, ", "), total, blocks.size());
  Cuts cuts = {0};
  for (const std::int64_t size : sizes) {
    const auto first = blocks.begin() + cuts.back(), last = first + size;
    if (std::none_of(first, last, is_trained))
      throw UsageError("parallel.stage_layers is [{}], and none of the blocks of stage {} has a "
                       "parameter that is trained: give each stage one that has",
                       fmt::join(sizes, ", "), cuts.size() - 1);
    cuts.push_back(cuts.back() + static_cast<int>(size));
  }
  return cuts;
}

// Blocks of which nothing is trained, such as activations, go with the one before them, and count
// nothing.
Cuts balanced_cuts(const ParallelSection& parallel, const std::vector<ModelBlock>& blocks,
                   int num_stages) {
  const auto num_trained = std::ranges::count_if(blocks, is_trained);
  if (num_trained < num_stages)
    throw UsageError(
        "parallel.pipeline is {}, which with this schedule is {} stages, and of the model's {} "
        "block{} {} {} a parameter that is trained, as each stage needs one: take a smaller "
        "pipeline, a schedule with fewer stages a rank, or list smaller blocks",
        parallel.pipeline, num_stages, blocks.size(), blocks.size() == 1 ? "" : "s", num_trained,
        num_trained == 1 ? "has" : "have");
  std::vector<double> costs = pipeline::num_parameters_of(blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (!is_trained(blocks[i]))
      costs[i] = 0;
    else if (parallel.balance == StageBalance::layers)
      costs[i] = 1;
  return pipeline::partition(costs, num_stages);
}

// A part of a model computes in this type, as the whole one would.
ModelBlock cast_to(ModelBlock block, c10::ScalarType type, c10::DeviceType device) {
  block.forward = [forward = std::move(block.forward), type,
                   device](const std::vector<at::Tensor>& inputs) {
    const device::Autocast cast(device, type);
    return forward(inputs);
  };
  return block;
}

// Stages know a weight that they share by its name: UsageError if they have it under different
// ones.
void check_shared_names(const torch::nn::Module& model, const std::vector<ModelBlock>& blocks,
                        const Cuts& cuts) {
  std::map<const torch::nn::Module*, std::string> prefixes;
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    prefixes.emplace(item.value().get(), item.key() + ".");
  std::map<const at::TensorImpl*, std::pair<std::size_t, std::set<std::string>>> first;  // stage
  for (std::size_t stage = 0; stage + 1 < cuts.size(); ++stage) {
    std::map<const at::TensorImpl*, std::set<std::string>> names;
    for (int i = cuts[stage]; i < cuts[stage + 1]; ++i)
      for (const auto& module : blocks[static_cast<std::size_t>(i)].modules) {
        if (module == nullptr) continue;
        for (const auto& item : module->named_parameters())
          names[item.value().unsafeGetTensorImpl()].insert(prefixes[module.get()] + item.key());
      }
    for (const auto& [tensor, here] : names) {
      const auto& [other, there] = first.try_emplace(tensor, stage, here).first->second;
      if (there != here)
        throw UsageError(
            "stages {} and {} of the pipeline share a weight that they know as '{}' and "
            "as '{}': let both blocks list the module that registers it",
            other, stage, fmt::join(there, "', '"), fmt::join(here, "', '"));
    }
  }
}

std::int64_t kind_of(const MicroBatch& batch) {
  if (!batch.input.defined()) return 0;
  return static_cast<std::int64_t>(hash_text(fmt::format(
      "{} {}", c10::toString(batch.input.scalar_type()), fmt::join(batch.input.sizes(), ", "))));
}

}  // namespace

ModulePipeline::ModulePipeline(DistributedManager dist, std::shared_ptr<torch::nn::Module> model,
                               std::vector<ModelBlock> blocks, Options options)
    : dist_(std::move(dist)), group_(dist_.mesh().axis("pp")), options_(std::move(options)) {
  const pipeline::Schedule schedule = schedule_of(options_.parallel, options_.num_micro_batches);
  rank_of_stage_ = schedule.rank_of_stage;
  pipeline::BlockCut cut;
  std::string fault;
  try {
    const ParallelSection& parallel = options_.parallel;
    cut.cuts = parallel.stage_layers.empty()
                   ? balanced_cuts(parallel, blocks, schedule.num_stages())
                   : given_cuts(parallel.stage_layers, blocks, schedule.num_stages());
    check_shared_names(*model, blocks, cut.cuts);
  } catch (const UsageError& error) {
    fault = error.what();
  }
  // All ranks of the job agree, not only those of a pipeline: the others would wait for them.
  pipeline::check_same_blocks({.model = *model,
                               .blocks = blocks,
                               .sample = {},
                               .rank_of_stage = rank_of_stage_,
                               .cut = cut,
                               .fault = fault},
                              *dist_.world());
  if (options_.autocast)
    for (ModelBlock& block : blocks)
      block = cast_to(std::move(block), *options_.autocast, dist_.device().type());
  stages_ = pipeline::split_model(
      {.model = std::move(model),
       .blocks = std::move(blocks),
       .input =
           [this](int micro_batch) {
             return std::vector{batches_[static_cast<std::size_t>(micro_batch)].input};
           },
       .loss =
           [this](int micro_batch, const auto& outputs) {
             return loss_of(static_cast<std::size_t>(micro_batch), outputs);
           }},
      rank_of_stage_, *group_, cut);
}

void ModulePipeline::check_tied(const std::shared_ptr<torch::nn::Module>& model) {
  const auto parameters = model->named_parameters();
  for (const mesh::HeldTensor& held : dist_.held_state(model)) {
    const at::Tensor* const parameter = parameters.find(held.name);
    if (parameter == nullptr || held.placement.has_whole_box_of_tensor()) continue;
    for (const pipeline::TiedParameter& tied : stages_.tied)
      if (parameter->is_same(tied.mine))
        throw UsageError("'{}' is shared by stages of the pipeline, and a tensor axis cuts it: "
                         "leave it out of tensor_plan",
                         held.name);
  }
}

void ModulePipeline::check_size(std::int64_t num_micro_batches) const {
  (void)schedule_of(options_.parallel, num_micro_batches);
}

pipeline::Pipeline& ModulePipeline::pipeline_for(std::size_t num_micro_batches) {
  auto& made = pipelines_[num_micro_batches];
  if (made != nullptr) return *made;
  pipeline::Schedule schedule =
      can_schedule(num_micro_batches)
          ? schedule_of(options_.parallel, static_cast<std::int64_t>(num_micro_batches))
          : pipeline::one_micro_batch(rank_of_stage_);
  LOCKSTEP_CHECK(schedule.rank_of_stage == rank_of_stage_, "{} lies differently", schedule.name);
  made = std::make_unique<pipeline::Pipeline>(
      std::move(schedule), stages_.mine, group_,
      pipeline::PipelineOptions{.device = dist_.device(), .tied = stages_.tied});
  return *made;
}

// A schedule's file is for whole steps; what is left of an epoch then goes through one by one.
bool ModulePipeline::can_schedule(std::size_t num_micro_batches) const {
  return options_.parallel.schedule_file.empty() ||
         num_micro_batches == static_cast<std::size_t>(options_.num_micro_batches);
}

template <typename Pass>
PassesLoss ModulePipeline::with_batches(const std::vector<MicroBatch>& batches,
                                        const OutputLoss& loss, const Pass& pass) {
  loss_ = &loss;
  count_ = 0;
  outputs_.clear();
  double sum = 0;
  const std::size_t at_once = can_schedule(batches.size()) ? batches.size() : 1;
  for (std::size_t begin = 0; begin < batches.size(); begin += at_once) {
    begin_ = begin;
    batches_ = std::span(batches).subspan(begin, at_once);
    std::vector<std::int64_t> kinds;
    for (const MicroBatch& batch : batches_) kinds.push_back(kind_of(batch));
    pipeline::Pipeline& pipe = pipeline_for(at_once);
    pipe.expect_kinds(std::move(kinds));
    sum += pass(pipe);
  }
  batches_ = {};
  scale_ = nullptr;
  return {.sum = sum, .count = count_of(batches, loss)};
}

PassesLoss ModulePipeline::run(const std::vector<MicroBatch>& batches, const OutputLoss& loss,
                               const GradientScale& scale) {
  scale_ = scale;
  keeps_outputs_ = false;
  return with_batches(batches, loss, [](pipeline::Pipeline& pipe) { return pipe.run_step(); });
}

PassesLoss ModulePipeline::evaluate(const std::vector<MicroBatch>& batches, const OutputLoss& loss,
                                    at::Tensor* output) {
  keeps_outputs_ = output != nullptr;
  const PassesLoss made =
      with_batches(batches, loss, [](pipeline::Pipeline& pipe) { return pipe.evaluate(); });
  std::vector<at::Tensor> parts;
  for (const auto& [micro_batch, part] : std::exchange(outputs_, {})) parts.push_back(part);
  if (!parts.empty()) *output = at::cat(parts);
  return made;
}

// On the rank of the last stage.
at::Tensor ModulePipeline::loss_of(std::size_t micro_batch, const std::vector<at::Tensor>& made) {
  const MicroBatch& batch = batches_[micro_batch];
  if (made.size() != 1)
    throw UsageError("the last of the model's blocks returns {} tensors: the loss takes one",
                     made.size());
  const at::Tensor& output = made.front();
  if (keeps_outputs_ && output.dim() == 0)
    throw UsageError("the last of the model's blocks returns one number for {} samples: it must "
                     "have a row for each",
                     batch.samples);
  if (keeps_outputs_ && batch.samples > 0) outputs_[begin_ + micro_batch] = output.detach();
  nn::LossSum loss = loss_->of(output, batch);
  if (!loss.sum.defined() || loss.sum.numel() != 1)
    throw UsageError("the loss of a micro-batch of {} samples is not one number: take its mean or "
                     "its sum",
                     batch.samples);
  if (batch.samples == 0)
    loss.sum = loss.sum * 0;
  else
    count_ += loss.count;
  return scale_ ? scale_(loss.sum) : loss.sum;
}

std::int64_t ModulePipeline::count_of(const std::vector<MicroBatch>& batches,
                                      const OutputLoss& loss) const {
  std::int64_t samples = 0;
  for (const MicroBatch& batch : batches) samples += batch.samples;
  if (!loss.counts_itself) return samples;
  // Only the rank of the last stage has counted.
  return static_cast<std::int64_t>(RankMessages(group_).sum(static_cast<double>(count_)));
}

at::Tensor ModulePipeline::from_last_stage(at::Tensor output) const {
  const int last = rank_of_stage_.back();
  const bool is_mine = group_->rank() == last;
  std::vector<std::int64_t> numbers;
  if (is_mine) numbers = pipeline::to_numbers(pipeline::shape_of({output}));
  const at::Tensor size = at::tensor({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  group_->broadcast(size, last).wait();
  numbers.resize(
      static_cast<std::size_t>(pipeline::checked_count(size.item<std::int64_t>(), group_->name())));
  const at::Tensor shape = at::tensor(numbers, at::kLong);
  group_->broadcast(shape, last).wait();
  const auto entry =
      pipeline::shape_from({shape.data_ptr<std::int64_t>(), numbers.size()}, group_->name())
          .entries.at(0);
  output = is_mine ? output.contiguous()
                   : at::empty(entry.sizes, at::dtype(entry.type).device(dist_.device()));
  // Transports do not know all types, but they know bytes.
  if (output.numel() > 0) group_->broadcast(output.view({-1}).view(at::kByte), last).wait();
  return output;
}

std::unique_ptr<ModulePipeline> build_in_stages(
    DistributedManager& dist, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
    const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
    const ModulePipeline::Options& options) {
  std::unique_ptr<ModulePipeline> stages;
  const auto model = dist.build_model(make, [&](const std::shared_ptr<torch::nn::Module>& whole) {
    std::vector<pipeline::ModelBlock> blocks = list_blocks();
    if (blocks.empty())
      throw UsageError("the pipeline has {} ranks, and this '{}' does not say which blocks its "
                       "stages are made of: return a torch::nn::Sequential, give it a member "
                       "pipeline_blocks(), or, for an engine, pass initialize() a function that "
                       "lists them (docs/engine.md)",
                       options.parallel.pipeline, whole->name());
    stages = std::make_unique<ModulePipeline>(dist, whole, std::move(blocks), options);
  });
  // Each looks at its own stage.
  say_together(RankMessages(dist.world()), [&] {
    if (dist.synchronises_batch_norms(model))
      throw UsageError(
          "a batch norm of the model was synchronised (convert_sync_batchnorm), and the "
          "pipeline has {} ranks: batch norms take their statistics over the "
          "micro-batches of a stage's rank; leave it out, or take a pipeline of 1",
          options.parallel.pipeline);
    if (options.parallel.tensor > 1) stages->check_tied(model);
    return std::string();
  });
  return stages;
}

}  // namespace lockstep::train

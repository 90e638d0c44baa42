#include <lockstep/parallel/pipeline/split_model.h>

#include <algorithm>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/save_guard.h>

namespace lockstep::pipeline {

namespace {

using Modules = std::set<const torch::nn::Module*>;

std::string fault_of(const ListedModel& model) {
  if (!model.input) return "a listed model has no input: say what its first block is given";
  if (!model.loss) return "a listed model has no loss: say what it is of what its last block makes";
  return "";
}

// Whether the module, or a module in it, is among these.
bool has_any_of(const torch::nn::Module& module, const Modules& these) {
  if (these.contains(&module)) return true;
  return std::ranges::any_of(module.children(),
                             [&](const auto& child) { return has_any_of(*child, these); });
}

// `is_theirs` says that the owner is, or is in, a module that other ranks' blocks list.
void unregister_others(torch::nn::Module& owner, const Modules& kept, const Modules& others,
                       bool is_theirs) {
  if (kept.contains(&owner)) return;
  for (const auto& child : owner.named_children()) {
    const bool child_is_theirs = is_theirs || others.contains(child.value().get());
    if (child_is_theirs && !has_any_of(*child.value(), kept))
      owner.unregister_module(child.key());
    else
      unregister_others(*child.value(), kept, others, child_is_theirs);
  }
}

// From now on a rank has some of the model's layers, under the names that they have in all of it.
void guard_saving(torch::nn::Module& model, int num_ranks) {
  if (num_ranks == 1) return;
  const std::string how = fmt::format("in stages on {} ranks", num_ranks);
  data_parallel::guard_saving(
      model,
      std::make_shared<data_parallel::SaveGuard>(
          "pipeline",
          fmt::format("torch::save() and torch::load() find the layers of this rank alone in a "
                      "model that is {}: write what dist.full_state_dict() returns on the main "
                      "rank, once wrap_model() had the model; or, on each rank, torch::save() of "
                      "model->parameters() into a file of its own. Load before the model is split, "
                      "or with dist.load_full_state_dict()",
                      how),
          how));
}

// Tensors of other ranks' stages have no memory here. An operator that uses one is refused, with
// the reason.
void refuse_others(const Modules& others, const StageTensors& stages,
                   const std::vector<int>& rank_of_stage, int rank) {
  std::set<const c10::TensorImpl*> mine;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    if (rank_of_stage[stage] == rank)
      for (const at::Tensor& tensor : stages[stage]) mine.insert(tensor.unsafeGetTensorImpl());
  intercept::claim_key();
  for (const torch::nn::Module* module : others)
    for (const at::Tensor& tensor : tensors_of(*module)) {
      if (mine.contains(tensor.unsafeGetTensorImpl()) || intercept::is_tagged(tensor)) continue;
      intercept::tag(tensor);
      intercept::add_owner(tensor.storage(), nullptr,
                           "a parameter was used that another rank of the pipeline has: a model in "
                           "stages runs as a pipeline, with engine.train_batch() and eval_batch() "
                           "or pipeline::Pipeline, and its own forward() would need all of it");
    }
}

Stage stage_of(const ListedModel& model, int begin, int end,
               const std::vector<at::Tensor>& tensors) {
  const std::vector<ModelBlock> blocks(model.blocks.begin() + begin, model.blocks.begin() + end);
  const auto input = begin == 0 ? model.input : nullptr;
  const auto loss = end == static_cast<int>(model.blocks.size()) ? model.loss : nullptr;
  Stage stage;
  stage.forward = [=](int micro_batch, const std::vector<at::Tensor>& inputs) {
    std::vector<at::Tensor> x = input ? input(micro_batch) : inputs;
    for (const ModelBlock& block : blocks) x = block.forward(x);
    return loss ? std::vector<at::Tensor>{loss(micro_batch, x)} : x;
  };
  for (const at::Tensor& tensor : tensors)
    if (tensor.requires_grad()) stage.parameters.push_back(tensor);
  return stage;
}

}  // namespace

ModelStages split_model(const ListedModel& model, const std::vector<int>& rank_of_stage,
                        comm::Communicator& group, const BlockCut& cut, c10::Device device) {
  data_parallel::refuse_together(
      model.model ? "" : "a listed model has no model: say whose blocks these are", group);
  CutBlocks made = cut_blocks({.model = *model.model,
                               .blocks = model.blocks,
                               .sample = [&] { return model.input(0); },
                               .rank_of_stage = rank_of_stage,
                               .cut = cut,
                               .fault = fault_of(model)},
                              group);
  ModelStages stages{.mine = {}, .tied = std::move(made.tied), .cuts = made.cuts};
  Modules kept, others;
  for (std::size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    const bool mine = rank_of_stage[stage] == group.rank();
    const int begin = made.cuts[stage], end = made.cuts[stage + 1];
    for (int i = begin; i < end; ++i)
      for (const auto& module : model.blocks[static_cast<std::size_t>(i)].modules)
        (mine ? kept : others).insert(module.get());
    if (mine)
      stages.mine[static_cast<int>(stage)] = stage_of(model, begin, end, made.tensors[stage]);
  }
  refuse_others(others, made.tensors, rank_of_stage, group.rank());
  unregister_others(*model.model, kept, others, others.contains(model.model.get()));
  guard_saving(*model.model, group.size());
  model.model->to(device);
  return stages;
}

torch::nn::Sequential children_of(const torch::nn::Sequential& model, int begin, int end) {
  torch::nn::Sequential part;
  const auto children = model->named_children();
  auto child = model->begin() + begin;
  for (int index = begin; index < end; ++index, ++child)
    part->push_back(children[static_cast<std::size_t>(index)].key(), *child);
  return part;
}

SequentialParts split_sequential(const torch::nn::Sequential& model,
                                 const std::vector<int>& rank_of_stage, comm::Communicator& group,
                                 const SequentialCut& cut) {
  std::string fault;
  if (cut.cuts.empty() && cut.balance == Balance::time && !cut.sample.defined())
    fault = "stages are to be balanced by time, and there is no sample to measure it with: set "
            "SequentialCut::sample to the input of a micro-batch";
  CutBlocks made = cut_blocks({.model = *model,
                               .blocks = blocks_of(model),
                               .sample = [&] { return std::vector<at::Tensor>{cut.sample}; },
                               .rank_of_stage = rank_of_stage,
                               .cut = {.balance = cut.balance, .cuts = cut.cuts},
                               .fault = fault},
                              group);
  guard_saving(*model.ptr(), group.size());
  SequentialParts parts{.mine = {}, .cuts = made.cuts, .tied = std::move(made.tied)};
  for (std::size_t stage = 0; stage < rank_of_stage.size(); ++stage)
    if (rank_of_stage[stage] == group.rank())
      parts.mine.emplace(stage, children_of(model, made.cuts[stage], made.cuts[stage + 1]));
  return parts;
}

}  // namespace lockstep::pipeline

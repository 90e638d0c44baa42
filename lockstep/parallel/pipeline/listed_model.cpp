#include <lockstep/parallel/pipeline/listed_model.h>

#include <algorithm>
#include <set>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/parallel/data_parallel/agreement.h>

namespace lockstep::pipeline {

namespace {

using Modules = std::set<const torch::nn::Module*>;

std::string fault_of(const ListedModel& model) {
  if (!model.input) return "a listed model has no input: say what its first block is given";
  if (!model.loss) return "a listed model has no loss: say what it is of what its last block makes";
  return "";
}

// Whether it, or something in it, is among these.
bool has_any_of(const torch::nn::Module& module, const Modules& these) {
  if (these.contains(&module)) return true;
  return std::ranges::any_of(module.children(),
                             [&](const auto& child) { return has_any_of(*child, these); });
}

// `is_theirs`: the owner is, or is within, a module that other ranks' blocks list.
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
  unregister_others(*model.model, kept, others, others.contains(model.model.get()));
  model.model->to(device);
  return stages;
}

}  // namespace lockstep::pipeline

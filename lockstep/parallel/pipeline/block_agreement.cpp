#include <lockstep/parallel/pipeline/block_agreement.h>

#include <algorithm>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>

namespace lockstep::pipeline {

namespace {

using ModuleNames = std::map<const torch::nn::Module*, std::string>;

ModuleNames names_in(const torch::nn::Module& model) {
  ModuleNames names = {{&model, ""}};
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    names.emplace(item.value().get(), item.key());
  return names;
}

// Not its children's.
bool has_own_tensors(const torch::nn::Module& module) {
  return !module.parameters(/*recurse=*/false).empty() ||
         !module.buffers(/*recurse=*/false).empty();
}

using Modules = std::set<const torch::nn::Module*>;

Modules within(const torch::nn::Module& module) {
  Modules all;
  for (const auto& child : module.modules(/*include_self=*/false)) all.insert(child.get());
  return all;
}

bool has(const ModelBlock& block, const torch::nn::Module* module) {
  return std::ranges::any_of(block.modules, [&](const auto& listed) {
    return listed.get() == module || within(*listed).contains(module);
  });
}

// A rank that has only a part of a module unregisters the rest of it, which LibTorch can do to
// modules and not to a module's own tensors.
void check_parts_of_modules(const ModuleNames& names, const std::vector<ModelBlock>& blocks) {
  Modules whole;  // what blocks have, with all that is in it
  for (const ModelBlock& block : blocks)
    for (const auto& module : block.modules) {
      whole.insert(module.get());
      whole.merge(within(*module));
    }
  for (const torch::nn::Module* owner : whole) {
    if (!has_own_tensors(*owner)) continue;
    const Modules parts = within(*owner);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      for (const auto& part : blocks[i].modules)
        if (parts.contains(part.get()) && !has(blocks[i], owner))
          throw UsageError(
              "block {} of the model has '{}', and another block '{}', which that is a part of and "
              "which has parameters or buffers of its own: the two cannot be on different ranks. "
              "Put its own into a module of theirs, or let both blocks have all of it",
              i, names.at(part.get()), names.at(owner));
  }
}

void check_blocks(const torch::nn::Module& model, const std::vector<ModelBlock>& blocks,
                  int num_stages, const BlockCut& cut) {
  const ModuleNames names = names_in(model);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].forward) throw UsageError("block {} of the model has no forward", i);
    for (const auto& module : blocks[i].modules)
      if (!names.contains(module.get()))
        throw UsageError(
            "block {} of the model has a module{} that is not registered in the model, "
            "so that nothing names its parameters: register_module() it",
            i, module == nullptr ? "" : fmt::format(" ({})", module->name()));
  }
  check_parts_of_modules(names, blocks);
  const auto num_blocks = static_cast<int>(blocks.size());
  if (!cut.cuts.empty()) return check_cuts(cut.cuts, num_blocks, num_stages);
  partition(std::vector<double>(blocks.size(), 1), num_stages);  // refuses what is too few
}

// One for each module of a block, and for each of its tensors; then the model's other tensors.
std::vector<std::string> lines_of(const torch::nn::Module& model,
                                  const std::vector<ModelBlock>& blocks) {
  std::vector<std::string> lines;
  std::map<const c10::TensorImpl*, std::string> names;
  const auto describe = [&](const std::string& name, const at::Tensor& tensor) {
    const auto [known, is_new] = names.emplace(tensor.unsafeGetTensorImpl(), name);
    lines.push_back(
        fmt::format("'{}' ({} of shape [{}]{}{})", name, c10::toString(tensor.scalar_type()),
                    fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? "" : ", not trained",
                    is_new ? "" : fmt::format(", the same as '{}'", known->second)));
  };
  const auto describe_all = [&](const std::string& prefix, const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) describe(prefix + item.key(), item.value());
    for (const auto& item : module.named_buffers()) describe(prefix + item.key(), item.value());
  };
  const ModuleNames modules = names_in(model);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].modules.empty()) lines.push_back(fmt::format("block {} without modules", i));
    for (const auto& module : blocks[i].modules) {
      const std::string& name = modules.at(module.get());
      lines.push_back(fmt::format("'{}' ({}) in block {}", name, module->name(), i));
      describe_all(name.empty() ? "" : name + ".", *module);
    }
  }
  describe_all("", model);
  return lines;
}

}  // namespace

void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group) {
  if (const auto found = data_parallel::first_difference(lines, group))
    throw UsageError("rank {} of '{}' was given another pipeline than rank 0: {} instead of {}. "
                     "Give all ranks the same",
                     found->rank, group.name(), found->on_rank, found->on_first);
}

void agree_on_blocks(const torch::nn::Module& model, const std::vector<ModelBlock>& blocks,
                     const std::vector<int>& rank_of_stage, comm::Communicator& group,
                     const BlockCut& cut, std::string fault) {
  try {
    check_blocks(model, blocks, static_cast<int>(rank_of_stage.size()), cut);
  } catch (const UsageError& error) {
    fault = error.what();
  }
  data_parallel::refuse_together(fault, group);
  std::vector<std::string> lines = {
      fmt::format("stages on ranks [{}]", fmt::join(rank_of_stage, ", ")),
      cut.cuts.empty()
          ? fmt::format("balanced by {}",
                        cut.balance == Balance::time ? "time" : "numbers of parameters")
          : fmt::format("cut at [{}]", fmt::join(cut.cuts, ", "))};
  for (std::string& line : lines_of(model, blocks)) lines.push_back(std::move(line));
  check_same_lines(lines, group);
}

void share_from_first_holder(const StageTensors& stages, const std::vector<int>& rank_of_stage,
                             comm::Communicator& group) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> in_order;  // the same order on every rank
  std::map<const c10::TensorImpl*, std::vector<int>> holders;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    for (const at::Tensor& tensor : stages[stage]) {
      std::vector<int>& ranks = holders[tensor.unsafeGetTensorImpl()];
      if (ranks.empty()) in_order.push_back(tensor);
      ranks.push_back(rank_of_stage[stage]);
    }
  for (const at::Tensor& tensor : in_order) {
    const std::vector<int>& ranks = holders.at(tensor.unsafeGetTensorImpl());
    if (std::set(ranks.begin(), ranks.end()).size() < 2 || tensor.numel() == 0) continue;
    const at::Tensor sent = tensor.detach().cpu().contiguous().clone();
    group.broadcast(sent, ranks.front()).wait();
    tensor.detach().copy_(sent);
  }
}

}  // namespace lockstep::pipeline

#include <lockstep/parallel/pipeline/model_blocks.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/recompute/surroundings.h>

namespace lockstep::pipeline {

namespace {

using ModuleNames = std::map<const torch::nn::Module*, std::string>;

ModuleNames names_in(const torch::nn::Module& model) {
  ModuleNames names = {{&model, ""}};
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    names.emplace(item.value().get(), item.key());
  return names;
}

// Whether the module has tensors itself, without its children.
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

// A rank that has only a part of a module unregisters the rest. LibTorch can unregister child
// modules, but not a module's own tensors.
void check_parts_of_modules(const ModuleNames& names, const std::vector<ModelBlock>& blocks) {
  Modules whole;  // the modules of all blocks and everything in them
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

// A line for each module of each block and for each of its tensors, then for the model's tensors.
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

// Parameters and buffers that stages of several ranks share are broadcast from the first rank that
// has them. Every rank calls it, while it still has all of them.
void share_from_first_holder(const StageTensors& stages, const std::vector<int>& rank_of_stage,
                             comm::Communicator& group) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> in_order;  // in the same order on every rank
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

constexpr int kRunsMeasured = 3;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void wait_for_device(const at::Tensor& tensor) {
  // Copying a number to the host waits for the device to compute it.
  if (!tensor.is_cpu() && tensor.numel() > 0) tensor.reshape({-1})[0].item();
}

// Runs forward and backward once. `outputs` are the inputs of the next block.
double seconds_of_block(const ModelBlock& block, const std::vector<at::Tensor>& given,
                        std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> inputs, wanted;
  for (const at::Tensor& one : given) {
    const at::Tensor leaf = one.detach().clone().requires_grad_(one.is_floating_point());
    inputs.push_back(leaf.clone());  // the block may write into it
    if (leaf.requires_grad()) wanted.push_back(leaf);
  }
  for (const auto& module : block.modules)
    for (const at::Tensor& parameter : module->parameters())
      if (parameter.requires_grad()) wanted.push_back(parameter);
  const auto start = std::chrono::steady_clock::now();
  outputs = block.forward(inputs);
  std::vector<at::Tensor> made, slopes;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    made.push_back(output);
    slopes.push_back(at::ones_like(output));
  }
  std::vector<at::Tensor> last = outputs;
  if (!made.empty() && !wanted.empty())
    for (const at::Tensor& gradient :
         torch::autograd::grad(made, wanted, slopes, /*retain_graph=*/false,
                               /*create_graph=*/false, /*allow_unused=*/true))
      if (gradient.defined()) last = {gradient};
  for (const at::Tensor& tensor : last) wait_for_device(tensor);
  for (at::Tensor& output : outputs) output = output.detach();
  return seconds_since(start);
}

}  // namespace

std::vector<ModelBlock> blocks_of(const torch::nn::Sequential& model) {
  std::vector<ModelBlock> blocks;
  torch::nn::Sequential children = model;  // a holder of the same module
  for (torch::nn::AnyModule& child : *children)
    blocks.push_back({{child.ptr()}, [child](const std::vector<at::Tensor>& inputs) mutable {
                        return std::vector<at::Tensor>{child.forward(inputs.at(0))};
                      }});
  return blocks;
}

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

std::vector<double> num_parameters_of(const std::vector<ModelBlock>& blocks) {
  std::vector<double> numbers;
  for (const ModelBlock& block : blocks) {
    double sum = 0;
    for (const auto& module : block.modules)
      for (const at::Tensor& parameter : module->parameters())
        sum += static_cast<double>(parameter.numel());
    numbers.push_back(sum);
  }
  return numbers;
}

std::vector<double> seconds_of(const torch::nn::Module& model,
                               const std::vector<ModelBlock>& blocks,
                               const std::function<std::vector<at::Tensor>()>& sample) {
  const c10::AutoGradMode with_gradients(true);
  // Buffers of modules that no block lists are included, as blocks may use them.
  const activations::BufferValues values(model.buffers());
  const auto generators = activations::GeneratorStates::now();
  const std::vector<at::Tensor> first = sample();
  std::vector<double> seconds(blocks.size(), std::numeric_limits<double>::infinity());
  for (int run = 0; run < kRunsMeasured; ++run) {
    std::vector<at::Tensor> x = first;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::vector<at::Tensor> outputs;
      seconds[i] = std::min(seconds[i], seconds_of_block(blocks[i], x, outputs));
      x = std::move(outputs);
    }
  }
  values.restore();
  generators.restore();
  return seconds;
}

namespace {

using Implementation = const c10::TensorImpl*;

// The times that the first rank measures.
std::vector<double> agreed_seconds(const CutRequest& request, comm::Communicator& group) {
  at::Tensor seconds = at::empty({static_cast<std::int64_t>(request.blocks.size())}, at::kDouble);
  std::exception_ptr failure;
  try {
    if (group.rank() == 0)
      seconds = at::tensor(seconds_of(request.model, request.blocks, request.sample), at::kDouble);
  } catch (...) {
    failure = std::current_exception();
    seconds.fill_(-1);
  }
  group.broadcast(seconds, 0).wait();
  if (failure) std::rethrow_exception(failure);
  if (seconds.min().item<double>() < 0)
    throw UsageError("rank 0 of '{}' could not measure the layers: its own error says why",
                     group.name());
  const double* first = seconds.data_ptr<double>();
  return {first, first + seconds.numel()};
}

Cuts cuts_of(const CutRequest& request, comm::Communicator& group) {
  if (!request.cut.cuts.empty()) return request.cut.cuts;
  return partition(request.cut.balance == Balance::parameters ? num_parameters_of(request.blocks)
                                                              : agreed_seconds(request, group),
                   static_cast<int>(request.rank_of_stage.size()));
}

// Lists each tensor of a stage once.
StageTensors tensors_of_stages(const CutRequest& request, const Cuts& cuts) {
  std::set<Implementation> in_blocks;
  for (const ModelBlock& block : request.blocks)
    for (const auto& module : block.modules)
      for (const at::Tensor& tensor : tensors_of(*module))
        in_blocks.insert(tensor.unsafeGetTensorImpl());
  StageTensors stages;
  for (std::size_t stage = 0; stage + 1 < cuts.size(); ++stage) {
    std::vector<at::Tensor>& mine = stages.emplace_back();
    std::set<Implementation> seen;
    const auto add = [&](const at::Tensor& tensor) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) mine.push_back(tensor);
    };
    for (int i = cuts[stage]; i < cuts[stage + 1]; ++i)
      for (const auto& module : request.blocks[static_cast<std::size_t>(i)].modules)
        for (const at::Tensor& tensor : tensors_of(*module)) add(tensor);
    for (const at::Tensor& tensor : tensors_of(request.model))
      if (!in_blocks.contains(tensor.unsafeGetTensorImpl())) add(tensor);
  }
  return stages;
}

// The shared parameters in the order of their first use.
std::vector<TiedParameter> tied_between(const StageTensors& stages,
                                        const std::vector<int>& rank_of_stage, int rank) {
  std::vector<TiedParameter> found;
  std::map<Implementation, std::size_t> places;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    for (const at::Tensor& tensor : stages[stage]) {
      if (!tensor.requires_grad()) continue;
      const auto [place, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), found.size());
      if (is_new) found.push_back({{}, tensor});
      found[place->second].stages.push_back(static_cast<int>(stage));
    }
  std::erase_if(found, [](const TiedParameter& tied) { return tied.stages.size() < 2; });
  for (TiedParameter& tied : found)
    if (std::ranges::none_of(tied.stages, [&](int stage) {
          return rank_of_stage[static_cast<std::size_t>(stage)] == rank;
        }))
      tied.mine = at::Tensor();
  return found;
}

void free_others(const StageTensors& stages, const std::vector<int>& rank_of_stage, int rank) {
  std::set<Implementation> kept;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    if (rank_of_stage[stage] == rank)
      for (const at::Tensor& tensor : stages[stage]) kept.insert(tensor.unsafeGetTensorImpl());
  for (const std::vector<at::Tensor>& stage : stages)
    for (at::Tensor tensor : stage) {
      if (kept.contains(tensor.unsafeGetTensorImpl())) continue;
      tensor.mutable_grad() = at::Tensor();
      tensor.set_data(at::empty({0}, tensor.options().requires_grad(false)));
    }
}

}  // namespace

void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group) {
  if (const auto found = data_parallel::first_difference(lines, group))
    throw UsageError("rank {} of '{}' was given another pipeline than rank 0: {} instead of {}. "
                     "Give all ranks the same",
                     found->rank, group.name(), found->on_rank, found->on_first);
}

void check_same_blocks(const CutRequest& request, comm::Communicator& group) {
  const auto& [model, blocks, sample, rank_of_stage, cut, known_fault] = request;
  std::string fault = known_fault;
  if (fault.empty()) try {
      intercept::refuse_wrapped(model, "split_model() or Pipe");
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

CutBlocks cut_blocks(const CutRequest& request, comm::Communicator& group) {
  check_same_blocks(request, group);
  CutBlocks made;
  made.cuts = cuts_of(request, group);
  made.tensors = tensors_of_stages(request, made.cuts);
  share_from_first_holder(made.tensors, request.rank_of_stage, group);
  made.tied = tied_between(made.tensors, request.rank_of_stage, group.rank());
  free_others(made.tensors, request.rank_of_stage, group.rank());
  return made;
}

}  // namespace lockstep::pipeline

#include <lockstep/parallel/pipeline/cut_blocks.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/block_agreement.h>

namespace lockstep::pipeline {

namespace {

using Implementation = const c10::TensorImpl*;

// As the first rank measures them.
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

// Each tensor of a stage once.
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

// In the order of the first use.
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

CutBlocks cut_blocks(const CutRequest& request, comm::Communicator& group) {
  agree_on_blocks(request.model, request.blocks, request.rank_of_stage, group, request.cut,
                  request.fault);
  CutBlocks made;
  made.cuts = cuts_of(request, group);
  made.tensors = tensors_of_stages(request, made.cuts);
  share_from_first_holder(made.tensors, request.rank_of_stage, group);
  made.tied = tied_between(made.tensors, request.rank_of_stage, group.rank());
  free_others(made.tensors, request.rank_of_stage, group.rank());
  return made;
}

}  // namespace lockstep::pipeline

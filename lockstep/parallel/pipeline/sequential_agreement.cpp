#include <lockstep/parallel/pipeline/sequential_agreement.h>

#include <map>
#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/difference.h>
#include <lockstep/parallel/pipeline/agreement.h>

namespace lockstep::pipeline {

namespace {

void check_cut(const torch::nn::Sequential& model, int num_stages, const SequentialCut& cut) {
  const auto num_children = static_cast<int>(model->size());
  if (!cut.cuts.empty()) return check_cuts(cut.cuts, num_children, num_stages);
  partition(std::vector<double>(model->size(), 1), num_stages);  // refuses what is too few
  if (cut.balance == Balance::time && !cut.sample.defined())
    throw UsageError("stages are to be balanced by time, and there is no sample to measure it "
                     "with: set SequentialCut::sample to the input of a micro-batch");
}

// One for each child, and for each of its tensors.
std::vector<std::string> lines_of(const torch::nn::Sequential& model) {
  std::vector<std::string> lines;
  std::map<const c10::TensorImpl*, std::string> names;
  const auto describe = [&](const std::string& name, const at::Tensor& tensor) {
    const auto [known, is_new] = names.emplace(tensor.unsafeGetTensorImpl(), name);
    lines.push_back(
        fmt::format("'{}' ({} of shape [{}]{}{})", name, c10::toString(tensor.scalar_type()),
                    fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? "" : ", not trained",
                    is_new ? "" : fmt::format(", the same as '{}'", known->second)));
  };
  for (const auto& child : model->named_children()) {
    lines.push_back(fmt::format("'{}' ({})", child.key(), child.value()->name()));
    const std::string prefix = child.key() + ".";
    for (const auto& item : child.value()->named_parameters())
      describe(prefix + item.key(), item.value());
    for (const auto& item : child.value()->named_buffers())
      describe(prefix + item.key(), item.value());
  }
  return lines;
}

}  // namespace

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group,
                      c10::Device device) {
  if (const auto found = data_parallel::first_difference(lines, group, device))
    throw UsageError("rank {} of '{}' was given another pipeline than rank 0: {} instead of {}. "
                     "Give all ranks the same",
                     found->rank, group.name(), found->on_rank, found->on_first);
}

void agree_on_sequential(const torch::nn::Sequential& model, const std::vector<int>& rank_of_stage,
                         comm::Communicator& group, const SequentialCut& cut, c10::Device device) {
  const c10::Device numbers = device_for_numbers(group, device);
  std::string fault;
  try {
    check_cut(model, static_cast<int>(rank_of_stage.size()), cut);
  } catch (const UsageError& error) {
    fault = error.what();
  }
  data_parallel::refuse_together(fault, group, numbers);
  std::vector<std::string> lines = {
      fmt::format("stages on ranks [{}]", fmt::join(rank_of_stage, ", ")),
      cut.cuts.empty()
          ? fmt::format("balanced by {}",
                        cut.balance == Balance::time ? "time" : "numbers of parameters")
          : fmt::format("cut at [{}]", fmt::join(cut.cuts, ", "))};
  for (std::string& line : lines_of(model)) lines.push_back(std::move(line));
  check_same_lines(lines, group, numbers);
}

void share_from_first_holder(const std::vector<torch::nn::Sequential>& stages,
                             const std::vector<int>& rank_of_stage, comm::Communicator& group,
                             c10::Device device) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> in_order;  // the same order on every rank
  std::map<const c10::TensorImpl*, std::vector<int>> holders;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    for (const at::Tensor& tensor : tensors_of(*stages[stage])) {
      std::vector<int>& ranks = holders[tensor.unsafeGetTensorImpl()];
      if (ranks.empty()) in_order.push_back(tensor);
      ranks.push_back(rank_of_stage[stage]);
    }
  for (const at::Tensor& tensor : in_order) {
    const std::vector<int>& ranks = holders.at(tensor.unsafeGetTensorImpl());
    if (std::set(ranks.begin(), ranks.end()).size() < 2 || tensor.numel() == 0) continue;
    const at::Tensor sent =
        tensor.detach().to(device_for_numbers(group, device)).contiguous().clone();
    group.broadcast(sent, ranks.front()).wait();
    tensor.detach().copy_(sent);
  }
}

}  // namespace lockstep::pipeline

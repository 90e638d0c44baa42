#include <lockstep/parallel/pipeline/sequential_parts.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/agreement.h>
#include <lockstep/parallel/pipeline/sequential_agreement.h>
#include <lockstep/recompute/buffer_values.h>
#include <lockstep/recompute/generator_states.h>

namespace lockstep::pipeline {

namespace {

constexpr int kRunsMeasured = 3;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void wait_for_device(const at::Tensor& tensor) {
  // Copying a number to the host waits for what computes it.
  if (!tensor.is_cpu() && tensor.numel() > 0) tensor.reshape({-1})[0].item();
}

// Forward and backward once; `output` is what the next child is given.
double seconds_of_child(torch::nn::AnyModule& child, const at::Tensor& given, at::Tensor& output) {
  const at::Tensor leaf = given.detach().clone().requires_grad_(given.is_floating_point());
  const at::Tensor input = leaf.clone();  // which the child may write into
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& parameter : child.ptr()->parameters())
    if (parameter.requires_grad()) wanted.push_back(parameter);
  if (leaf.requires_grad()) wanted.push_back(leaf);
  const auto start = std::chrono::steady_clock::now();
  output = child.forward(input);
  at::Tensor last = output;
  if (output.requires_grad() && !wanted.empty()) {
    const auto gradients =
        torch::autograd::grad({output}, wanted, {at::ones_like(output)}, /*retain_graph=*/false,
                              /*create_graph=*/false, /*allow_unused=*/true);
    for (const at::Tensor& gradient : gradients)
      if (gradient.defined()) last = gradient;
  }
  wait_for_device(last);
  output = output.detach();
  return seconds_since(start);
}

Cuts balanced(const torch::nn::Sequential& model, int num_stages, comm::Communicator& group,
              const SequentialCut& cut) {
  if (cut.balance == Balance::parameters) return partition(num_parameters_of(model), num_stages);
  at::Tensor seconds = at::empty({static_cast<std::int64_t>(model->size())}, at::kDouble);
  std::exception_ptr failure;
  try {
    if (group.rank() == 0) seconds = at::tensor(seconds_of(model, cut.sample), at::kDouble);
  } catch (...) {
    failure = std::current_exception();
    seconds.fill_(-1);
  }
  seconds = seconds.to(device_for_numbers(group, cut.sample.device()));
  group.broadcast(seconds, 0).wait();
  seconds = seconds.cpu();
  if (failure) std::rethrow_exception(failure);
  if (seconds.min().item<double>() < 0)
    throw UsageError("rank 0 of '{}' could not measure the layers: its own error says why",
                     group.name());
  const double* first = seconds.data_ptr<double>();
  return partition({first, first + seconds.numel()}, num_stages);
}

using Implementation = const c10::TensorImpl*;

// What is only in children of other ranks.
void free_others(const torch::nn::Sequential& model,
                 const std::map<int, torch::nn::Sequential>& mine) {
  std::set<Implementation> kept;
  for (const auto& [stage, part] : mine)
    for (const at::Tensor& tensor : tensors_of(*part)) kept.insert(tensor.unsafeGetTensorImpl());
  for (at::Tensor tensor : tensors_of(*model)) {
    if (kept.contains(tensor.unsafeGetTensorImpl())) continue;
    tensor.mutable_grad() = at::Tensor();
    tensor.set_data(at::empty({0}, tensor.options().requires_grad(false)));
  }
}

// In the order of the first use.
std::vector<TiedParameter> tied_between(const std::vector<torch::nn::Sequential>& parts) {
  std::vector<TiedParameter> found;
  std::map<Implementation, std::size_t> places;
  for (std::size_t stage = 0; stage < parts.size(); ++stage)
    for (const at::Tensor& parameter : parts[stage]->parameters()) {
      const auto [place, is_new] = places.emplace(parameter.unsafeGetTensorImpl(), found.size());
      if (is_new) found.push_back({{}, parameter});
      auto& stages = found[place->second].stages;
      const int index = static_cast<int>(stage);
      if (parameter.requires_grad() && (stages.empty() || stages.back() != index))
        stages.push_back(index);
    }
  std::erase_if(found, [](const TiedParameter& tied) { return tied.stages.size() < 2; });
  return found;
}

}  // namespace

std::vector<double> num_parameters_of(const torch::nn::Sequential& model) {
  std::vector<double> numbers;
  for (const auto& child : model->children()) {
    double sum = 0;
    for (const at::Tensor& parameter : child->parameters())
      sum += static_cast<double>(parameter.numel());
    numbers.push_back(sum);
  }
  return numbers;
}

std::vector<double> seconds_of(const torch::nn::Sequential& model, const at::Tensor& sample) {
  const c10::AutoGradMode with_gradients(true);
  torch::nn::Sequential children = model;  // the same ones
  const activations::BufferValues buffers(model->buffers());
  const auto generators = activations::GeneratorStates::now();
  std::vector<double> seconds(model->size(), std::numeric_limits<double>::infinity());
  for (int run = 0; run < kRunsMeasured; ++run) {
    at::Tensor x = sample;
    auto least = seconds.begin();
    for (torch::nn::AnyModule& child : *children) {
      at::Tensor output;
      *least = std::min(*least, seconds_of_child(child, x, output));
      ++least;
      x = output;
    }
  }
  buffers.restore();
  generators.restore();
  return seconds;
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
                                 const SequentialCut& cut, c10::Device device) {
  agree_on_sequential(model, rank_of_stage, group, cut, device);
  const int num_stages = static_cast<int>(rank_of_stage.size());
  SequentialParts parts;
  parts.cuts = cut.cuts.empty() ? balanced(model, num_stages, group, cut) : cut.cuts;
  std::vector<torch::nn::Sequential> all;
  for (std::size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    all.push_back(children_of(model, parts.cuts[stage], parts.cuts[stage + 1]));
    if (rank_of_stage[stage] == group.rank()) parts.mine.emplace(stage, all.back());
  }
  share_from_first_holder(all, rank_of_stage, group, device);
  parts.tied = tied_between(all);
  for (TiedParameter& tied : parts.tied)
    if (std::ranges::none_of(tied.stages, [&](int stage) { return parts.mine.contains(stage); }))
      tied.mine = at::Tensor();
  free_others(model, parts.mine);
  return parts;
}

}  // namespace lockstep::pipeline

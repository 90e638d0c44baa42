#include "chain.h"

#include <map>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/utils.h>

namespace lockstep::pipeline {

namespace {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

at::Tensor drawn(int micro_batch, at::IntArrayRef sizes) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + micro_batch));
  return at::randn(sizes);
}

std::int64_t width(int stage) { return 5 + stage % 3; }

Stage mlp_stage(int index, int num_stages) {
  nn::Sequential part(nn::Linear(width(index), 11), nn::GELU(), nn::Linear(11, width(index + 1)));
  const bool last = index + 1 == num_stages;
  return {[=](int micro_batch, const Tensors& inputs) mutable -> Tensors {
            const at::Tensor x = index == 0 ? drawn(micro_batch, {3, width(0)}) : inputs.at(0);
            const at::Tensor y = part->forward(x);
            return {last ? y.square().sum() : y};
          },
          part->parameters()};
}

Tensors mixed_start(int micro_batch) {
  return {drawn(micro_batch, {3, 4}),
          at::ones({2}, at::kDouble),
          at::arange(3) + micro_batch,
          at::arange(3).view({3, 1}) != micro_batch % 3,
          drawn(micro_batch, {2, 0, 2}).to(at::kHalf),
          at::tensor(micro_batch, at::kShort)};
}

// Outputs hidden [3, 4], doubles [2], ids [3], mask [3, 1], an empty [2, 0, 2], a short [], and two
// tensors that the next stage does not use: a number and a vector.
Stage mixed_stage(int index, int num_stages) {
  nn::Linear linear(4, 4);
  nn::Embedding table(20, 4);
  const at::Tensor scale = at::rand({2}, at::kDouble).requires_grad_();
  const at::Tensor unused = at::rand({3}).requires_grad_();
  const bool last = index + 1 == num_stages;
  return {[=](int micro_batch, const Tensors& given) mutable -> Tensors {
            const Tensors in = index == 0 ? mixed_start(micro_batch) : given;
            at::Tensor hidden = at::tanh(linear->forward(in[0]).t()).t() +
                                table->forward(in[2]) * in[3] + in[5].to(at::kFloat);
            at::Tensor doubles = in[1] * scale;
            if (last) return {(hidden.sum() * doubles.sum()).reshape({1, 1})};
            return {hidden, doubles, in[2], in[3], in[4], in[5], unused.sum(), unused * 2};
          },
          {linear->weight, linear->bias, table->weight, scale, unused}};
}

Stage lstm_stage(int index, int num_stages) {
  nn::LSTM lstm(nn::LSTMOptions(4, 4));
  const bool last = index + 1 == num_stages;
  return {[=](int micro_batch, const Tensors& in) mutable -> Tensors {
            const at::Tensor x = index == 0 ? drawn(micro_batch, {6, 2, 4}) : in.at(0);
            const at::Tensor zeros = at::zeros({1, 2, 4});
            const auto [y, state] = lstm->forward(
                x, index == 0 ? std::make_tuple(zeros, zeros) : std::make_tuple(in[1], in[2]));
            const auto& [h, c] = state;
            if (last) return {y.square().sum() + c.sum()};
            return {y, h, c};
          },
          lstm->parameters()};
}

Stage frozen_stage(int index, int num_stages) {
  Stage stage = mlp_stage(index, num_stages);
  if (index % 2 == 0)
    for (at::Tensor& parameter : stage.parameters) parameter.requires_grad_(false);
  return stage;
}

Stage make_stage(ChainKind kind, int index, int num_stages) {
  torch::manual_seed(static_cast<std::uint64_t>(index));
  switch (kind) {
    case ChainKind::mlp: return mlp_stage(index, num_stages);
    case ChainKind::mixed: return mixed_stage(index, num_stages);
    case ChainKind::lstm: return lstm_stage(index, num_stages);
    case ChainKind::frozen: break;
  }
  return frozen_stage(index, num_stages);
}

void add(at::Tensor& sum, const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  sum = sum.defined() ? sum + gradient : gradient.clone();
}

}  // namespace

const char* name_of(ChainKind kind) {
  switch (kind) {
    case ChainKind::mlp: return "mlp";
    case ChainKind::mixed: return "mixed";
    case ChainKind::lstm: return "lstm";
    case ChainKind::frozen: break;
  }
  return "frozen";
}

std::vector<Stage> make_chain(ChainKind kind, int num_stages) {
  std::vector<Stage> chain;
  for (int i = 0; i < num_stages; ++i) chain.push_back(make_stage(kind, i, num_stages));
  return chain;
}

std::map<int, Stage> stages_of_rank(const std::vector<Stage>& chain, const Schedule& schedule,
                                    int rank) {
  std::map<int, Stage> mine;
  for (std::size_t i = 0; i < chain.size(); ++i)
    if (schedule.rank_of_stage[i] == rank) mine[static_cast<int>(i)] = chain[i];
  return mine;
}

void run_whole(const std::vector<Stage>& chain, const Schedule& schedule, ChainResult& result) {
  // For each micro-batch, the gradients of each stage's parameters.
  std::vector<std::vector<Tensors>> gradients;
  result.loss = 0;
  for (int i = 0; i < schedule.num_micro_batches; ++i) {
    Tensors tensors;
    for (const Stage& stage : chain) tensors = stage.forward(i, tensors);
    result.loss += tensors[0].item<double>();
    if (tensors[0].requires_grad()) tensors[0].backward();
    auto& of_stages = gradients.emplace_back();
    for (const Stage& stage : chain) {
      Tensors& of_stage = of_stages.emplace_back();
      for (at::Tensor parameter : stage.parameters) {
        of_stage.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
        parameter.mutable_grad() = at::Tensor();
      }
    }
  }
  result.gradients.resize(chain.size());
  for (std::size_t s = 0; s < chain.size(); ++s) {
    result.gradients[s].resize(chain[s].parameters.size());
    for (const Action& action :
         schedule.actions[static_cast<std::size_t>(schedule.rank_of_stage[s])]) {
      if (action.stage != static_cast<int>(s) ||
          (action.kind != ActionKind::backward && action.kind != ActionKind::backward_weight))
        continue;
      const Tensors& of_pass = gradients[static_cast<std::size_t>(action.micro_batch)][s];
      for (std::size_t i = 0; i < of_pass.size(); ++i) add(result.gradients[s][i], of_pass[i]);
    }
  }
}

}  // namespace lockstep::pipeline

// Steps of our optimizers, compared with torch::optim or with the formula; and the things on which
// their bits must not depend.
#include <lockstep/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <ostream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tensors.h"

namespace lockstep::optim {
namespace {

using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::set_gradient;
using testing::snapshot;

constexpr double kLearningRate = 0.02;
constexpr double kDecay = 0.3;

// Makes a step on tensors that have their gradients.
using Peer = std::function<void()>;

struct Case {
  std::string name;
  OptimizerOptions options;
  double weight_decay;
  std::function<Peer(std::vector<at::Tensor>)> peer;
  double amplified = 1;  // how much more than an elementwise step's rounding may show
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

template <typename TorchOptimizer, typename TorchOptions>
std::function<Peer(std::vector<at::Tensor>)> torchs(const TorchOptions& options) {
  return [=](std::vector<at::Tensor> parameters) {
    const auto optimizer = std::make_shared<TorchOptimizer>(std::move(parameters), options);
    return [optimizer] { optimizer->step(); };
  };
}

// One step of a parameter by a formula; the state begins as zeros.
struct FormulaStep {
  at::Tensor weight, gradient;
  at::Tensor first, second;  // of the state
  double step = 0;           // from 1
};

std::function<Peer(std::vector<at::Tensor>)> by_formula(
    std::function<void(const FormulaStep&)> formula) {
  return [=](const std::vector<at::Tensor>& parameters) {
    auto steps = std::make_shared<std::vector<FormulaStep>>();
    for (const at::Tensor& one : parameters)
      steps->push_back({.weight = one.detach(),
                        .gradient = {},
                        .first = at::zeros_like(one).detach(),
                        .second = at::zeros_like(one).detach()});
    return [=] {
      const c10::NoGradGuard no_grad;
      for (std::size_t i = 0; i < steps->size(); ++i) {
        FormulaStep& one = steps->at(i);
        one.gradient = parameters[i].grad();
        if (!one.gradient.defined()) continue;
        ++one.step;
        formula(one);
      }
    };
  };
}

void lion_formula(const FormulaStep& s) {
  const at::Tensor push = (0.8 * s.first + 0.2 * s.gradient).sign();
  s.weight.copy_(s.weight * (1 - kLearningRate * kDecay) - kLearningRate * push);
  s.first.copy_(0.95 * s.first + 0.05 * s.gradient);
}

// The formula of DeepSpeed's FusedLamb.
void lamb_formula(const FormulaStep& s, double min_coeff, double max_coeff, bool inside) {
  s.first.copy_(0.8 * s.first + 0.2 * s.gradient);
  s.second.copy_(0.95 * s.second + 0.05 * s.gradient * s.gradient);
  const at::Tensor root = inside ? (s.second + 1e-2).sqrt() : s.second.sqrt() + 1e-2;
  const at::Tensor direction = s.first / root + kDecay * s.weight;
  const auto norm = [](const at::Tensor& x) {
    return std::sqrt(x.to(at::kDouble).square().sum().item<double>());
  };
  const double coeff = std::clamp(norm(s.weight) / norm(direction), min_coeff, max_coeff);
  const double rate =
      kLearningRate * std::sqrt(1 - std::pow(0.95, s.step)) / (1 - std::pow(0.8, s.step));
  s.weight.sub_(direction, rate * coeff);
}

at::Tensor newton_schulz(const at::Tensor& matrix, int num_steps) {
  const at::Tensor wide = matrix.size(0) > matrix.size(1) ? matrix.t() : matrix;
  at::Tensor x = wide / (wide.square().sum().sqrt() + 1e-7);
  for (int i = 0; i < num_steps; ++i) {
    const at::Tensor square = at::matmul(x, x.t());
    x = 3.4445 * x - 4.775 * at::matmul(square, x) +
        2.0315 * at::matmul(square, at::matmul(square, x));
  }
  return matrix.size(0) > matrix.size(1) ? x.t() : x;
}

void adamw_formula(const FormulaStep& s, double rate) {
  s.first.copy_(0.8 * s.first + 0.2 * s.gradient);
  s.second.copy_(0.95 * s.second + 0.05 * s.gradient * s.gradient);
  const at::Tensor mean = s.first / (1 - std::pow(0.8, s.step));
  const at::Tensor square = s.second / (1 - std::pow(0.95, s.step));
  s.weight.copy_(s.weight * (1 - rate * kDecay) - rate * mean / (square.sqrt() + 1e-2));
}

// As DeepSpeed's Muon.
void muon_formula(const FormulaStep& s) {
  if (s.weight.dim() < 2) return adamw_formula(s, kLearningRate);
  s.first.copy_(0.9 * s.first + 0.1 * s.gradient);
  const auto rows = static_cast<double>(s.weight.size(0));
  const auto columns = static_cast<double>(s.weight.size(1));
  const double scale = std::sqrt(std::max(1.0, rows / columns));
  s.weight.copy_(s.weight * (1 - kLearningRate * kDecay) -
                 kLearningRate * scale * newton_schulz(0.1 * s.gradient + 0.9 * s.first, 5));
}

// As torch.optim.Muon with "match_rms_adamw", beside an AdamW with a learning rate of its own.
void muon_by_rms_formula(const FormulaStep& s) {
  if (s.weight.dim() < 2) return adamw_formula(s, kLearningRate / 2);
  const double rate = 3 * kLearningRate;
  s.first.copy_(0.7 * s.first + 0.3 * s.gradient);
  const auto largest = static_cast<double>(std::max(s.weight.size(0), s.weight.size(1)));
  s.weight.copy_(s.weight * (1 - rate * kDecay) -
                 rate * 0.2 * std::sqrt(largest) * newton_schulz(s.first, 3));
}

// Every option differs from its default, and the epsilons are large enough to show in the result.
std::vector<Case> elementwise_cases() {
  const std::array<double, 2> betas = {0.8, 0.95};
  const auto torch_betas = std::make_tuple(betas[0], betas[1]);
  const auto sgd = [](double momentum, double dampening, bool nesterov, double decay) {
    return torchs<torch::optim::SGD>(torch::optim::SGDOptions(kLearningRate)
                                         .momentum(momentum)
                                         .dampening(dampening)
                                         .nesterov(nesterov)
                                         .weight_decay(decay));
  };
  return {
      {"adamw", AdamWOptions{.betas = betas, .eps = 1e-2}, kDecay,
       torchs<torch::optim::AdamW>(torch::optim::AdamWOptions(kLearningRate)
                                       .betas(torch_betas)
                                       .eps(1e-2)
                                       .weight_decay(kDecay))},
      {"adamw_with_defaults", AdamWOptions{}, 0,
       torchs<torch::optim::AdamW>(torch::optim::AdamWOptions(kLearningRate).weight_decay(0))},
      {"adam_with_coupled_decay",
       AdamWOptions{.betas = betas, .eps = 1e-2, .decay = AdamDecay::coupled}, kDecay,
       torchs<torch::optim::Adam>(torch::optim::AdamOptions(kLearningRate)
                                      .betas(torch_betas)
                                      .eps(1e-2)
                                      .weight_decay(kDecay))},
      {"sgd", SGDOptions{}, kDecay, sgd(0, 0, false, kDecay)},
      {"sgd_with_momentum", SGDOptions{.momentum = 0.9, .dampening = 0.4}, kDecay,
       sgd(0.9, 0.4, false, kDecay)},
      {"sgd_nesterov", SGDOptions{.momentum = 0.9, .nesterov = true}, 0, sgd(0.9, 0, true, 0)},
      {"lion", LionOptions{.betas = betas}, kDecay, by_formula(lion_formula)},
      {"adagrad", AdagradOptions{.eps = 1e-2, .lr_decay = 0.1}, kDecay,
       torchs<torch::optim::Adagrad>(torch::optim::AdagradOptions(kLearningRate)
                                         .eps(1e-2)
                                         .lr_decay(0.1)
                                         .weight_decay(kDecay))},
  };
}

std::vector<Case> cases() {
  std::vector<Case> all = elementwise_cases();
  const LambOptions lamb{.betas = {0.8, 0.95}, .eps = 1e-2};
  all.push_back({"lamb", lamb, kDecay,
                 by_formula([](const FormulaStep& s) { lamb_formula(s, 0.01, 10, false); })});
  LambOptions bounded = lamb;
  bounded.eps_inside_sqrt = true;
  bounded.max_coeff = 0.25;
  all.push_back({"lamb_at_its_bound", bounded, kDecay,
                 by_formula([](const FormulaStep& s) { lamb_formula(s, 0.01, 0.25, true); })});
  // The polynomial's slope at 0 is 3.4445: five steps make 485 times as much of an error in a small
  // singular value. An element of the direction has a share of that, and six steps of 0.02 times
  // the root of rows / columns, below 6, add up to less than one direction.
  constexpr double kAmplified = 500;
  all.push_back({"muon", MuonOptions{.momentum = 0.9, .betas = {0.8, 0.95}, .eps = 1e-2}, kDecay,
                 by_formula(muon_formula), kAmplified});
  all.push_back({"muon_by_rms",
                 MuonOptions{.momentum = 0.7,
                             .nesterov = false,
                             .ns_steps = 3,
                             .adjust_lr_fn = MuonRate::match_rms_adamw,
                             .betas = {0.8, 0.95},
                             .eps = 1e-2,
                             .muon_lr = 3e-3,
                             .adam_lr = 0.5e-3,
                             .lr = 1e-3},
                 kDecay, by_formula(muon_by_rms_formula), kAmplified});
  return all;
}

class EveryOptimizer : public ::testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Optimizer> make(std::vector<NamedParameter> parameters) const {
    return make_optimizer(GetParam().options, {{.parameters = std::move(parameters),
                                                .weight_decay = GetParam().weight_decay}});
  }

  // Makes six steps, in two of which the second parameter has no gradient.
  void beside_its_peer(at::ScalarType type, double tolerance) const {
    std::vector<NamedParameter> ours = {{"a", parameter({37, 11}, 1, type)},
                                        {"b", parameter({5}, 2, type)}};
    std::vector<at::Tensor> theirs;
    for (const auto& [name, tensor] : ours)
      theirs.push_back(snapshot(tensor).set_requires_grad(true));
    const auto optimizer = make(ours);
    const auto peer = GetParam().peer(theirs);
    for (std::uint64_t step = 0; step < 6; ++step) {
      for (std::size_t i = 0; i < ours.size(); ++i) {
        at::Tensor gradient;
        if (i == 0 || (step != 0 && step != 3))
          gradient = numbers(theirs[i].sizes(), 10 * step + i + 3, type);
        set_gradient(ours[i].tensor, gradient);
        set_gradient(theirs[i], gradient);
      }
      optimizer->step(kLearningRate);
      peer();
      for (std::size_t i = 0; i < ours.size(); ++i)
        EXPECT_LE((ours[i].tensor - theirs[i]).abs().max().item<double>(),
                  tolerance * (ours[i].tensor.dim() < 2 ? 1 : GetParam().amplified))
            << "step " << step << ", parameter " << ours[i].name;
    }
  }
};

TEST_P(EveryOptimizer, IsTorchsOrTheFormulaWithinRounding) {
  beside_its_peer(at::kFloat, 1e-6);
  beside_its_peer(at::kDouble, 1e-14);
}

class EveryElementwiseOptimizer : public EveryOptimizer {};

// Compares one parameter with the same numbers in shards of odd sizes, on one thread and on
// several.
TEST_P(EveryElementwiseOptimizer, BitsDependOnNeitherShardsNorThreads) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    const std::int64_t count = 200003;
    const at::Tensor whole = parameter({count}, 1, type);
    std::vector<NamedParameter> shards;
    for (std::int64_t begin = 0, length = 1; begin < count;
         begin += length, length = 3 * length + 1)
      shards.push_back({"shard" + std::to_string(begin),
                        snapshot(whole.detach().slice(0, begin, std::min(count, begin + length)))
                            .set_requires_grad(true)});
    const auto of_whole = make({{"whole", whole}});
    const auto of_shards = make(shards);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const at::Tensor gradient = numbers({count}, step + 2, type);
      set_gradient(whole, gradient);
      std::int64_t begin = 0;
      for (const auto& [name, tensor] : shards) {
        set_gradient(tensor, gradient.slice(0, begin, begin + tensor.numel()));
        begin += tensor.numel();
      }
      {
        const Threads threads(1);
        of_shards->step(kLearningRate);
      }
      const Threads threads(3);
      of_whole->step(kLearningRate);
    }
    std::vector<at::Tensor> pieces;
    for (const auto& [name, tensor] : shards) pieces.push_back(tensor);
    EXPECT_TRUE(same_bits(whole, at::cat(pieces)));
  }
}

TEST_P(EveryOptimizer, MemoryLayoutDoesNotMatter) {
  const at::Tensor plain = parameter({30, 20}, 1);
  const at::Tensor turned = snapshot(plain).t().contiguous().t().set_requires_grad(true);
  ASSERT_FALSE(turned.is_contiguous());
  const at::Tensor plain_too = snapshot(plain).set_requires_grad(true);
  const auto optimizer = make({{"plain", plain}, {"turned", turned}, {"plain_too", plain_too}});
  for (std::uint64_t step = 0; step < 3; ++step) {
    const at::Tensor gradient = numbers({30, 20}, step + 2);
    set_gradient(plain, gradient);
    set_gradient(turned, gradient.clone());
    set_gradient(plain_too, gradient.t().contiguous().t());
    optimizer->step(kLearningRate);
  }
  EXPECT_TRUE(same_bits(plain, turned));
  EXPECT_TRUE(same_bits(plain, plain_too));
  EXPECT_FALSE(turned.is_contiguous());
}

TEST_P(EveryOptimizer, CudaAgreesWithTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor here = parameter({1000, 33}, 1);
  const at::Tensor there = snapshot(here).cuda().set_requires_grad(true);
  const auto optimizer = make({{"here", here}, {"there", there}});
  for (std::uint64_t step = 0; step < 5; ++step) {
    const at::Tensor gradient = numbers({1000, 33}, step + 2);
    set_gradient(here, gradient);
    set_gradient(there, gradient.cuda());
    optimizer->step(kLearningRate);
  }
  EXPECT_LE((here - there.cpu()).abs().max().item<double>(), 1e-6 * GetParam().amplified);
}

// A factor acts as if the gradients had been multiplied before; with 0 there is no step at all,
// which the host may not know when the next step begins.
TEST_P(EveryOptimizer, AFactorMultipliesGradientsOrLeavesTheStepOut) {
  for (const c10::DeviceType device : {at::kCPU, at::kCUDA}) {
    if (device == at::kCUDA && !at::hasCUDA()) continue;
    std::vector<NamedParameter> stepped, wanted;
    for (const std::string name : {"always", "at times"}) {
      // One tensor has a layout for kernels, the other one that is left to operators.
      const at::Tensor laid_out = numbers({1000, 33}, 1).to(device);
      const at::Tensor values = name == "always" ? laid_out : laid_out.t().contiguous().t();
      stepped.push_back({name, values.clone().set_requires_grad(true)});
      wanted.push_back({name, values.clone().set_requires_grad(true)});
    }
    const auto optimizer = make(stepped), reference = make(wanted);
    const std::vector<double> factors = {0.0, 0.3, 0.0, 0.0, 1.0, 2.5, 0.0, 0.5};
    for (std::size_t step = 0; step < factors.size(); ++step) {
      optimizer->zero_grad();
      reference->zero_grad();
      // Every other step has a single parameter: the other's state stays that of its last step.
      for (std::size_t i = 0; i < 2 - step % 2; ++i) {
        const at::Tensor gradient = numbers({1000, 33}, step + 2).to(device);
        set_gradient(stepped[i].tensor, gradient.clone());
        set_gradient(wanted[i].tensor, gradient * factors[step]);
      }
      const auto number = at::dtype(at::kDouble).device(device);
      optimizer->step(kLearningRate, StepFactor(at::scalar_tensor(factors[step], number)));
      if (factors[step] != 0) reference->step(kLearningRate);
    }
    for (std::size_t i = 0; i < stepped.size(); ++i)
      EXPECT_TRUE(same_bits(stepped[i].tensor, wanted[i].tensor)) << stepped[i].name << device;
    const auto state = optimizer->state(), right = reference->state();
    for (std::size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(same_bits(state[i].tensor, right[i].tensor)) << state[i].name << device;
  }
}

// There are more tensors than one launch takes, of sizes that fit its pieces well and badly.
TEST(AdamW, CudaHasTheCpusBits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const auto type : {at::kFloat, at::kDouble}) {
    std::vector<NamedParameter> here, there;
    for (int i = 0; i < 150; ++i) {
      const std::int64_t count = i % 5 == 0 ? 4096 * (1 + i % 3) : 1 + 37 * i;
      const at::Tensor values = numbers({count}, static_cast<std::uint64_t>(i + 1)).to(type);
      here.push_back({std::to_string(i), values.clone().set_requires_grad(true)});
      there.push_back({std::to_string(i), values.cuda().set_requires_grad(true)});
    }
    const auto on_cpu = make_optimizer(AdamWOptions{}, {{.parameters = here, .weight_decay = 0.1}});
    const auto on_gpu =
        make_optimizer(AdamWOptions{}, {{.parameters = there, .weight_decay = 0.1}});
    for (std::uint64_t step = 0; step < 3; ++step) {
      for (std::size_t i = 0; i < here.size(); ++i) {
        // This parameter has no gradient in the first step, so its count of steps differs from then
        // on.
        if (step == 0 && i == 7) continue;
        const at::Tensor gradient = numbers(here[i].tensor.sizes(), 1000 * step + i).to(type);
        set_gradient(here[i].tensor, gradient);
        set_gradient(there[i].tensor, gradient.cuda());
      }
      on_cpu->step(kLearningRate);
      on_gpu->step(kLearningRate);
    }
    for (std::size_t i = 0; i < here.size(); ++i)
      EXPECT_TRUE(same_bits(here[i].tensor, there[i].tensor.cpu())) << here[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Optim, EveryOptimizer, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Optim, EveryElementwiseOptimizer, ::testing::ValuesIn(elementwise_cases()),
                         [](const auto& info) { return info.param.name; });

// A norm of 0 has no ratio: the update is taken as it is, and no weight becomes nan.
TEST(Lamb, ParametersOfZerosMoveByTheLearningRate) {
  const at::Tensor weight = at::zeros({5}, at::kDouble).set_requires_grad(true);
  const auto optimizer = make_optimizer(LambOptions{.bias_correction = false, .max_coeff = 0.5},
                                        {{.parameters = {{"a", weight}}}});
  set_gradient(weight, at::full({5}, 3.0, at::kDouble));
  optimizer->step(0.1);
  const double direction = 0.1 * 3 / (std::sqrt(0.001 * 9) + 1e-8);
  EXPECT_LE((weight + 0.1 * direction).abs().max().item<double>(), 1e-14);
  set_gradient(weight, at::zeros({5}, at::kDouble));
  optimizer->step(0.1);
  EXPECT_TRUE(weight.isfinite().all().item<bool>());
}

TEST(Muon, BringsSingularValuesNearOne) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{20, 50}, std::vector<std::int64_t>{50, 20}}) {
    const at::Tensor weight = at::zeros(shape).set_requires_grad(true);
    const auto optimizer = make_optimizer(MuonOptions{.adjust_lr_fn = MuonRate::match_rms_adamw},
                                          {{.parameters = {{"w", weight}}}});
    set_gradient(weight, 1e-3 * numbers(shape, 1));
    optimizer->step(1 / (0.2 * std::sqrt(50.0)));
    const at::Tensor values = std::get<1>(at::svd(weight.detach()));
    EXPECT_GT(values.min().item<double>(), 0.5);
    EXPECT_LT(values.max().item<double>(), 1.5);
  }
}

TEST(Muon, TakesWhatHasMoreDimsAsAMatrix) {
  const at::Tensor filters = parameter({8, 3, 5, 5}, 1);
  const at::Tensor matrix = snapshot(filters).view({8, 75}).set_requires_grad(true);
  const at::Tensor gradient = numbers({8, 3, 5, 5}, 2);
  set_gradient(filters, gradient);
  set_gradient(matrix, gradient.view({8, 75}));
  make_optimizer(MuonOptions{}, {{.parameters = {{"f", filters}, {"m", matrix}}}})->step(0.1);
  EXPECT_TRUE(same_bits(filters.view({8, 75}), matrix));
}

TEST(Muon, LeavesEmbeddingsOutputLayersAndVectorsToAdamW) {
  const std::vector<std::string> names = {"wte.weight", "embed_tokens.weight", "lm_head.weight",
                                          "norm.weight", "told.weight"};
  std::vector<NamedParameter> ours, theirs;
  for (const std::string& name : names) {
    const bool is_vector = name == "norm.weight";
    const at::Tensor values = is_vector ? numbers({7}, 1) : numbers({7, 4}, 1);
    for (auto* list : {&ours, &theirs}) {
      list->push_back({name, values.clone().set_requires_grad(true)});
      set_gradient(list->back().tensor, is_vector ? numbers({7}, 2) : numbers({7, 4}, 2));
    }
  }
  const NamedParameter told = ours.back();
  ours.pop_back();
  const auto muon = make_optimizer(
      MuonOptions{}, {{.parameters = ours, .weight_decay = 0.1},
                      {.parameters = {told}, .weight_decay = 0.1, .matrices = MatrixRule::none}});
  const auto adamw = make_optimizer(AdamWOptions{.betas = {0.9, 0.95}, .eps = 1e-10},
                                    {{.parameters = theirs, .weight_decay = 0.1}});
  muon->step(0.1);
  adamw->step(0.1);
  ours.push_back(told);
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(same_bits(ours[i].tensor, theirs[i].tensor)) << names[i];
  EXPECT_EQ(muon->state().size(), adamw->state().size());
  EXPECT_EQ(
      make_optimizer(MuonOptions{}, {{.parameters = {theirs[0]}, .matrices = MatrixRule::all}})
          ->state()[1]
          .name,
      "momentum_buffer.wte.weight");
}

TEST(Optimizer, GroupsHaveTheirOwnDecayAndLearningRate) {
  const at::Tensor a = parameter({3}, 1);
  const at::Tensor b = snapshot(a).set_requires_grad(true);
  const at::Tensor c = snapshot(a).set_requires_grad(true);
  const at::Tensor before = snapshot(a);
  const auto optimizer =
      make_optimizer(SGDOptions{}, {{.parameters = {{"a", a}}},
                                    {.parameters = {{"b", b}}, .learning_rate_factor = 3},
                                    {.parameters = {{"c", c}}, .weight_decay = 0.5}});
  for (const at::Tensor& tensor : {a, b, c}) set_gradient(tensor, at::ones({3}));
  optimizer->step(0.25);
  EXPECT_TRUE(at::allclose(a.detach(), before - 0.25));
  EXPECT_TRUE(at::allclose(b.detach(), before - 0.75));
  EXPECT_TRUE(at::allclose(c.detach(), before - 0.25 * (1 + 0.5 * before)));
}

TEST(Optimizer, ZeroGradLeavesGradientsUndefined) {
  const at::Tensor a = parameter({3}, 1);
  const at::Tensor b = parameter({3}, 2);
  set_gradient(a, at::ones({3}));
  make_optimizer(SGDOptions{}, {{.parameters = {{"a", a}, {"b", b}}}})->zero_grad();
  EXPECT_FALSE(a.grad().defined());
  EXPECT_FALSE(b.grad().defined());
}

// Autograd must not differentiate a graph from before the step with the weights from after it.
TEST(Optimizer, AutogradNoticesThatWeightsChanged) {
  const at::Tensor a = parameter({3}, 1);
  const at::Tensor loss = (a * a).sum();
  set_gradient(a, at::ones({3}));
  make_optimizer(AdamWOptions{}, {{.parameters = {{"a", a}}}})->step(0.1);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(Optimizer, EmptyParametersAndNoParametersAreFine) {
  const at::Tensor empty = parameter({0, 4}, 1);
  set_gradient(empty, at::empty({0, 4}));
  const auto optimizer = make_optimizer(AdamWOptions{}, {{.parameters = {{"empty", empty}}}});
  optimizer->step(0.1);
  EXPECT_EQ(optimizer->state()[0].tensor.item<std::int64_t>(), 1);
  make_optimizer(AdamWOptions{}, {})->step(0.1);
}

TEST(DecayGroups, MatricesDecayAndVectorsDoNot) {
  const std::vector<NamedParameter> parameters = {{"embedding", parameter({4, 2}, 1)},
                                                  {"norm", parameter({2}, 2)},
                                                  {"convolution", parameter({2, 2, 3, 3}, 3)},
                                                  {"scale", parameter({}, 4)}};
  const auto names = [](const ParameterGroup& group) {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : group.parameters) result.push_back(name);
    return result;
  };
  const auto groups = decay_groups(parameters, 0.1);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].weight_decay, 0.1);
  EXPECT_THAT(names(groups[0]), ::testing::ElementsAre("embedding", "convolution"));
  EXPECT_EQ(groups[1].weight_decay, 0);
  EXPECT_THAT(names(groups[1]), ::testing::ElementsAre("norm", "scale"));

  const auto everything = decay_groups(parameters, 0.1, DecayRule::everything);
  ASSERT_EQ(everything.size(), 1u);
  EXPECT_EQ(everything[0].weight_decay, 0.1);
  EXPECT_EQ(everything[0].parameters.size(), 4u);
  EXPECT_TRUE(decay_groups({}, 0.1).empty());
}

// As in DeepSpeed with "bias_correction": false.
TEST(AdamW, WithoutBiasCorrection) {
  const at::Tensor weight = parameter({37}, 1, at::kDouble);
  at::Tensor expected = snapshot(weight), mean = at::zeros_like(expected), square = mean.clone();
  const auto optimizer =
      make_optimizer(AdamWOptions{.betas = {0.8, 0.9}, .eps = 1e-2, .bias_correction = false},
                     {{.parameters = {{"a", weight}}, .weight_decay = 0.1}});
  for (std::uint64_t step = 0; step < 4; ++step) {
    const at::Tensor gradient = numbers({37}, step + 2, at::kDouble);
    set_gradient(weight, gradient);
    optimizer->step(kLearningRate);
    mean = 0.8 * mean + 0.2 * gradient;
    square = 0.9 * square + 0.1 * gradient * gradient;
    expected = expected * (1 - kLearningRate * 0.1) - kLearningRate * mean / (square.sqrt() + 1e-2);
    EXPECT_LE((weight - expected).abs().max().item<double>(), 1e-14) << "step " << step;
  }
}

}  // namespace
}  // namespace lockstep::optim

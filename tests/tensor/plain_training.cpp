#include <numeric>

#include <c10/core/InferenceMode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>

#include <lockstep/device/live_bytes.h>
#include <lockstep/recompute/recompute.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

at::Tensor gelu_of(const at::Tensor& x) { return at::gelu(x); }

struct TwoMlps {
  std::shared_ptr<PlainMlp> whole, cut;
};

TwoMlps two_mlps(const Activation& activation = gelu_of, at::ScalarType type = at::kDouble) {
  const auto one = [&] {
    torch::manual_seed(3);
    auto module = std::make_shared<PlainMlp>(activation);
    module->to(type);
    return module;
  };
  return {one(), one()};
}

void expect_same_step(Cells& cells, PlainMlp& cut, PlainMlp& whole, double tolerance = 1e-10) {
  torch::manual_seed(5);
  const at::Tensor x = at::randn({2, 3, 8}, whole.fc1->weight.scalar_type());
  const at::Tensor of_whole = nn::leaf(x), of_cut = nn::leaf(x);
  const at::Tensor wanted = uneven_loss(whole.forward(of_whole));
  const at::Tensor got = uneven_loss(cut.forward(of_cut));
  nn::expect_within(cells, got, wanted, tolerance, "the loss");
  wanted.backward();
  got.backward();
  nn::expect_within(cells, of_cut.grad(), of_whole.grad(), tolerance, "the input's gradient");
  expect_same_plain_gradients(cells, cut, whole, tolerance);
}

// The optimizer was made before the cut and steps after it; gradients exist already.
void check_cut_later(Cells& cells) {
  auto [whole, cut] = two_mlps();
  const auto whole_optimizer = adamw(whole->parameters()), optimizer = adamw(cut->parameters());
  expect_same_step(cells, *cut, *whole);
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  expect_same_plain_gradients(cells, *cut, *whole, 1e-10);
  for (int step = 0; step < 2; ++step) {
    expect_same_step(cells, *cut, *whole);
    whole_optimizer->step();
    optimizer->step();
  }
  expect_same_weights(cells, *cut, *whole, 1e-10);
}

// The model lives on without the returned object, and changes its type.
void check_other_type(Cells& cells) {
  auto [whole, cut] = two_mlps(gelu_of, at::kFloat);
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  whole->to(at::kDouble);
  cut->to(at::kDouble);
  expect_same_step(cells, *cut, *whole);
  cells.expect(is_cut(cut->fc1->weight) == (cells.num_ranks() > 1), "it is whole again");
}

void check_frozen_weights(Cells& cells) {
  for (const char* const frozen : {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}) {
    auto [whole, cut] = two_mlps();
    auto parallelized = parallelize_module(*cut, cells.group(), kColumnThenRow);
    whole->named_parameters()[frozen].requires_grad_(false);
    cut->named_parameters()[frozen].requires_grad_(false);
    expect_same_step(cells, *cut, *whole);
    expect_gathered_by(cells, parallelized, {});
  }
}

void check_plain_evaluation(Cells& cells) {
  auto [whole, cut] = two_mlps();
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  const at::Tensor x = at::ones({2, 3, 8}, at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    nn::expect_within(cells, cut->forward(x), whole->forward(x), 1e-10, "without gradients");
  }
  const c10::InferenceMode inference;
  nn::expect_within(cells, cut->forward(x), whole->forward(x), 1e-10, "in inference mode");
}

void check_plain_recomputed(Cells& cells) {
  auto [whole, cut] = two_mlps();
  auto parallelized = parallelize_module(*cut, cells.group(), kColumnThenRow);
  const at::Tensor x = at::randn({2, 3, 8}, at::kDouble);
  const at::Tensor of_whole = nn::leaf(x), of_cut = nn::leaf(x);
  whole->forward(of_whole).sum().backward();
  const auto& model = cut;
  lockstep::recompute([&](const at::Tensor& input) { return model->forward(input); }, of_cut)
      .sum()
      .backward();
  nn::expect_within(cells, of_cut.grad(), of_whole.grad(), 1e-10, "the input's gradient");
  expect_same_plain_gradients(cells, *cut, *whole, 1e-10);
  expect_gathered_by(cells, parallelized, {});
}

// autograd::grad, and hooks, with parameters that are cut.
void check_grad_of(Cells& cells) {
  auto [whole, cut] = two_mlps();
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  const at::Tensor x = at::ones({2, 3, 8}, at::kDouble);
  const auto wanted = torch::autograd::grad({uneven_loss(whole->forward(x))}, whole->parameters());
  const auto got = torch::autograd::grad({uneven_loss(cut->forward(x))}, cut->parameters());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    nn::expect_within(cells, full_tensor(got[i]), wanted[i], 1e-10, fmt::format("gradient {}", i));
  int heard = 0;
  for (const auto& model : {whole, cut})
    model->fc1->weight.register_hook([&](const at::Tensor& gradient) {
      ++heard;
      return gradient * 2;
    });
  expect_same_step(cells, *cut, *whole);
  cells.expect(heard == 2, fmt::format("hooks were called {} times", heard));
}

// The optimizer looks at all parameters at once, so they are gathered.
void check_lbfgs(Cells& cells) {
  auto [whole, cut] = two_mlps();
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  const at::Tensor x = at::ones({2, 3, 8}, at::kDouble);
  const auto train = [&](PlainMlp& model) {
    torch::optim::LBFGS optimizer(model.parameters(), torch::optim::LBFGSOptions(0.1));
    const auto closure = [&] {
      optimizer.zero_grad();
      const at::Tensor loss = model.forward(x).square().mean();
      loss.backward();
      return loss;
    };
    optimizer.step(closure);
  };
  train(*whole);
  train(*cut);
  expect_same_weights(cells, *cut, *whole, 1e-8);
}

// Initial weights are drawn as one process draws them.
void check_drawn_again(Cells& cells) {
  auto [whole, cut] = two_mlps();
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  for (const auto& model : {whole, cut}) {
    torch::manual_seed(8);
    model->fc1->reset_parameters();
    model->fc2->reset_parameters();
  }
  expect_same_weights(cells, *cut, *whole, 0);
}

// Parameters, gradients and optimizer state of the cut layers take 1/t of the memory, as the
// allocator counts it.
void check_plain_memory(Cells& cells) {
  const int ranks = cells.num_ranks();
  const std::int64_t hidden = 64, inner = 1024;
  const device::LiveBytes live(c10::Device(at::kCPU));
  torch::nn::Linear fc1(torch::nn::LinearOptions(hidden, inner).bias(false));
  const std::int64_t whole_bytes = live.now();
  cells.expect(whole_bytes == hidden * inner * 4, "the counter counts something else");
  auto parallelized = parallelize_module(*fc1, cells.group(), {{"", Cut::column}});
  const auto expect_parts = [&](int count, const std::string& what) {
    const std::int64_t wanted = count * whole_bytes / ranks;
    // Optimizers and modules keep a few bytes besides.
    cells.expect(live.now() >= wanted && live.now() <= wanted + 1024,
                 fmt::format("{}: {} bytes where {} are right", what, live.now(), wanted));
  };
  expect_parts(1, "a parameter");
  fc1->forward(at::ones({2, hidden})).sum().backward();
  expect_parts(2, "and its gradient");
  torch::optim::AdamW optimizer(fc1->parameters());
  optimizer.step();
  expect_parts(4, "and two states");
  std::int64_t bytes = 0;
  for (const auto& one : parallelized.cut_parameters())
    bytes += static_cast<std::int64_t>(one.parameter.nbytes());
  if (ranks > 1)
    cells.expect(bytes == whole_bytes / ranks, fmt::format("parts of {} bytes", bytes));
}

// There is one sum in forward and one in backward, and no other call.
void check_plain_traffic(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  const auto group = cells.group()->split(0, cells.rank(), "counted plain");
  const auto calls_of = [&](const std::function<void()>& body) {
    const auto before = group->recorder().last_sequence();
    body();
    std::string calls;
    for (const flight::Entry& entry : group->recorder().entries())
      if (entry.sequence > before) calls += entry.summary.substr(0, entry.summary.find(' ')) + " ";
    return calls;
  };
  PlainMlp model(gelu_of);
  parallelize_module(model, group, kColumnThenRow);
  at::Tensor y;
  const at::Tensor x = at::ones({2, 3, 8}).requires_grad_();
  const std::string forward = calls_of([&] { y = model.forward(x); });
  cells.expect(forward == "all_reduce ", "forward asks for " + forward);
  const std::string backward = calls_of([&] { y.sum().backward(); });
  cells.expect(backward == "all_reduce ", "backward asks for " + backward);
  const auto optimizer = adamw(model.parameters());
  const std::string step = calls_of([&] {
    optimizer->step();
    optimizer->zero_grad();
  });
  cells.expect(step.empty(), "a step asks for " + step);
}

}  // namespace

void check_plain_training(Cells& cells) {
  cells.cell("cut after an optimizer was made", [&] { check_cut_later(cells); });
  cells.cell("cut, then of another type", [&] { check_other_type(cells); });
  cells.cell("cut and frozen", [&] { check_frozen_weights(cells); });
  cells.cell("cut and evaluated", [&] { check_plain_evaluation(cells); });
  cells.cell("cut and recomputed", [&] { check_plain_recomputed(cells); });
  cells.cell("gradients asked for", [&] { check_grad_of(cells); });
  cells.cell("LBFGS", [&] { check_lbfgs(cells); });
  cells.cell("weights drawn again", [&] { check_drawn_again(cells); });
  cells.cell("memory of parts", [&] { check_plain_memory(cells); });
  cells.cell("what a plain MLP sends", [&] { check_plain_traffic(cells); });
}

}  // namespace lockstep::tensor

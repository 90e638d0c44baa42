#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/autocast.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A user's autograd function, which is no operator.
class Cubed : public torch::autograd::Function<Cubed> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    return {gradients[0] * x * x * 3};
  }
};

class Normed : public torch::autograd::Function<Normed> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor sum = x.exp().sum(-1, true);
    const at::Tensor y = x.exp() / sum;
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor y = context->get_saved_variables()[0];
    const at::Tensor product = gradients[0] * y;
    return {product - y * product.sum(-1, true)};
  }
};

struct GraphCase {
  std::string name;
  Activation activation;
};

at::Tensor hooked(const at::Tensor& x) {
  x.register_hook([](const at::Tensor& gradient) { return gradient * 2 + 1; });
  return at::gelu(x);
}

std::vector<GraphCase> graph_cases() {
  using T = const at::Tensor&;
  return {
      {"a function", [](T x) { return Cubed::apply(x); }},
      {"a function of a function", [](T x) { return Cubed::apply(at::tanh(Cubed::apply(x))); }},
      {"a function beside operators", [](T x) { return Cubed::apply(x) + at::gelu(x); }},
      {"a function's result in place", [](T x) { return Cubed::apply(x).mul_(2).add_(x); }},
      {"a function of something in place",
       [](T x) {
         at::Tensor y = x * 2;
         y.mul_(x);
         return Cubed::apply(y);
       }},
      {"a function that adds up features", [](T x) { return Normed::apply(x); }},
      {"a function of what was gathered", [](T x) { return Cubed::apply(x.flip({-1})); }},
      {"a hook", hooked},
      {"a hook on a view", [](T x) { return hooked(x.unsqueeze(0)).squeeze(0); }},
      {"a hook, then in place",
       [](T x) {
         at::Tensor y = x * 1;
         y.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
         return at::tanh(y) * y;
       }},
  };
}

void check_graph(Cells& cells, const GraphCase& one) {
  expect_same_training<PlainMlp>(
      cells,
      {.make = [&] { return std::make_shared<PlainMlp>(one.activation); },
       .input = {2, 3, 8},
       .loss = [](PlainMlp& model, const at::Tensor& x,
                  int) { return uneven_loss(model.forward(x)); },
       .optimizer = adamw,
       .gathers = one.name == "a function of what was gathered"
                      ? std::set<std::string>{"aten::flip"}
                      : std::set<std::string>{}},
      {at::kDouble, 1e-9});
}

// Everything that a user may ask of an activation.
void check_activation(Cells& cells) {
  torch::manual_seed(3);
  PlainMlp whole(at::relu);
  torch::manual_seed(3);
  PlainMlp cut(at::relu);
  parallelize_module(cut, cells.group(), kColumnThenRow);
  const at::Tensor x = at::ones({2, 8});
  at::Tensor kept[2];
  int i = 0;
  for (PlainMlp* const model : {&whole, &cut}) {
    at::Tensor y = model->fc1(x);
    cells.expect(y.requires_grad() && !y.is_leaf(), "an activation has no graph");
    y.retain_grad();
    model->fc2(at::gelu(y)).square().sum().backward();
    kept[i++] = full_tensor(y.grad());
    // Backward from the middle of the graph, and to the middle.
    const at::Tensor z = model->fc1(x);
    z.backward(at::ones_like(z) * 2);
    at::Tensor leaf = model->fc1(x).detach().requires_grad_();
    model->fc2(at::gelu(leaf)).sum().backward();
    model->fc1(x).backward(leaf.grad());
  }
  nn::expect_within(cells, kept[1], kept[0], 1e-5, "a gradient that was kept");
  expect_same_plain_gradients(cells, cut, whole, 1e-5);
  if (cells.num_ranks() == 1) return;
  cells.expect_usage_error(
      [&] {
        const at::Tensor y = cut.fc1(x);
        const at::Tensor z = y.view({2, 1, 24});
        y.mul_(2);
        Cubed::apply(z).sum().backward();
      },
      "was written to since");
}

// Writes to a part of a tensor that a user's function has saved.
void check_saved(Cells& cells) {
  torch::nn::Linear layer(8, 24);
  parallelize_module(*layer, cells.group(), {{"", Cut::column}});
  const at::Tensor y = layer(at::ones({2, 8}));
  const at::Tensor cubed = Cubed::apply(y);
  y.add_(1);
  bool thrown = false;
  try {
    cubed.sum().backward();
  } catch (const std::exception&) {
    thrown = true;
  }
  cells.expect(thrown, "nobody noticed that a saved tensor was written to");
}

void check_plain_autocast(Cells& cells) {
  torch::manual_seed(3);
  PlainMlp whole(at::relu);
  torch::manual_seed(3);
  PlainMlp cut(at::relu);
  auto parallelized = parallelize_module(cut, cells.group(), kColumnThenRow);
  const device::Autocast autocast(at::kCPU, at::kBFloat16);
  const at::Tensor x = at::linspace(-1, 1, 48).view({2, 3, 8});
  const at::Tensor wanted = whole.forward(x), got = cut.forward(x);
  cells.expect(got.scalar_type() == at::kBFloat16, "nothing was cast");
  nn::expect_within(cells, got, wanted, 4e-2, "the result");
  wanted.sum().backward();
  got.sum().backward();
  expect_same_plain_gradients(cells, cut, whole, 4e-2);
  expect_gathered_by(cells, parallelized, {});
}

}  // namespace

void check_plain_graph(Cells& cells) {
  for (const GraphCase& one : graph_cases())
    cells.cell("a graph with " + one.name, [&] { check_graph(cells, one); });
  cells.cell("an activation that is asked", [&] { check_activation(cells); });
  cells.cell("an activation that was saved", [&] { check_saved(cells); });
  cells.cell("plain autocast", [&] { check_plain_autocast(cells); });
}

}  // namespace lockstep::tensor

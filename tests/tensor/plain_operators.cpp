#include <torch/nn/functional/loss.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

enum class Expected { parts, gathered };

struct OperatorCase {
  std::string name;
  Activation function;
  Expected expected = Expected::parts;
  std::vector<std::int64_t> input = {2, 6, 8};  // shape of the input of a layer with 24 outputs
};

at::Tensor changed(at::Tensor x, const std::function<void(at::Tensor&)>& change) {
  change(x);
  return x;
}

std::vector<OperatorCase> operator_cases() {
  using T = const at::Tensor&;
  using enum Expected;
  std::vector<OperatorCase> cases = {
      {"t", [](T x) { return x.t(); }, parts, {6, 8}},
      {"transpose", [](T x) { return x.transpose(0, 2) * 2; }},
      {"transpose of others", [](T x) { return x.transpose(0, -2) + 1; }},
      {"permute",
       [](T x) {
         return x.permute({2, 0, -2}).exp();
       }},
      {"unsqueeze", [](T x) { return x.unsqueeze(0).unsqueeze(-1).sin(); }},
      {"squeeze", [](T x) { return x.unsqueeze(0).squeeze().unsqueeze(2).squeeze(2).squeeze(0); }},
      {"heads",
       [](T x) {
         return x.view({2, 6, 4, 6}).transpose(1, 2) * 3;
       }},
      {"heads and back",
       [](T x) {
         return x.view({2, 6, 4, 6}).transpose(1, 2).transpose(1, 2).reshape({2, 6, -1});
       }},
      {"flatten", [](T x) { return x.flatten(0, 1).sigmoid(); }},
      {"flatten all", [](T x) { return x.flatten().sigmoid(); }},
      {"samples and features in one dim, and back",
       [](T x) {
         return x.view({2, -1}).tanh().view({12, 24}) * 2;
       }},
      {"blocks of another size",
       [](T x) {
         return x.view({2, -1}).narrow(1, 24, 48).neg();
       }},
      {"a piece of a block",
       [](T x) {
         return x.view({2, -1}).narrow(1, 0, 36).neg();
       },
       gathered},
      {"repeat",
       [](T x) {
         return x.repeat({2, 1, 3}).cos();
       }},
      {"unflatten",
       [](T x) {
         return x.unflatten(2, {12, 2}).neg();
       }},
      {"heads that do not divide",
       [](T x) {
         return x.view({2, 6, 3, 8}).neg();
       },
       gathered},
      {"reshape of a transposed",
       [](T x) {
         return x.transpose(0, 1).reshape({12, 24}).abs();
       }},
      {"select", [](T x) { return x.select(1, 2) * x.select(0, 1).select(0, 0); }},
      {"slice", [](T x) { return x.slice(1, 1, 5, 2) + x.narrow(1, 0, 2); }},
      {"slice of features", [](T x) { return x.slice(-1, 1, 5) * 2; }, gathered},
      {"unbind", [](T x) { return x.unbind(0)[1] - x.unbind(1)[2].mul(2).select(0, 0); }},
      {"split",
       [](T x) {
         return x.split(3, 1)[0] * x.split_with_sizes({2, 3, 1}, 1)[1];
       }},
      {"chunk", [](T x) { return x.chunk(2, 1)[1].clone(); }},
      {"expand",
       [](T x) {
         return x.unsqueeze(1).expand({2, 3, 6, 24}) + 1;
       }},
      {"contiguous", [](T x) { return x.transpose(0, 2).contiguous().tan(); }},
      {"cat",
       [](T x) {
         return at::cat({x, x * 2, at::ones_like(x.detach()), x.narrow(0, 1, 1)}, 0);
       }},
      {"cat with a whole",
       [](T x) {
         return at::cat({at::linspace(0, 1, 144, x.options()).view({1, 6, 24}), x}, 0);
       }},
      {"cat of features",
       [](T x) {
         return at::cat({x, x * 2}, -1);
       },
       gathered},
      {"softmax", [](T x) { return at::softmax(x, -1); }},
      {"softmax of positions", [](T x) { return at::log_softmax(x.sin(), 1); }},
      {"heads that attend",
       [](T x) {
         const at::Tensor heads = x.view({2, 6, 4, 6}).transpose(1, 2);
         return at::matmul(at::softmax(at::matmul(heads, heads.transpose(2, 3)), -1), heads);
       }},
      {"a batch of products",
       [](T x) {
         const at::Tensor heads = x.view({6, 8, 6}).transpose(0, 1);
         return at::baddbmm(heads, at::bmm(heads, heads.transpose(1, 2)), heads, 0.5, 2);
       }},
      {"sums of positions", [](T x) { return x.sum(0) * x.mean(0, true); }},
      {"stack",
       [](T x) {
         return at::stack({x, x * 2});
       },
       gathered},
      {"another type", [](T x) { return x.to(at::kFloat).mul(2).to(x.scalar_type()); }},
      {"a scalar tensor", [](T x) { return x * at::full({}, 3, x.options()); }},
      {"a column of factors",
       [](T x) { return x * at::linspace(1, 2, 6, x.options()).unsqueeze(1); }},
      {"more dims",
       [](T x) {
         return at::linspace(1, 2, 5, x.options()).view({5, 1, 1, 1}) * x;
       }},
      {"comparison", [](T x) { return x.masked_fill(x > 0.1, 2) + x.lt(0).to(x.scalar_type()); }},
      {"clamp", [](T x) { return x.clamp(-0.1, 0.2) + x.clamp_min(0) - x.clamp_max(0.1); }},
      {"powers", [](T x) { return x.abs().pow(1.5) + x.square() + x.abs().add(1).rsqrt(); }},
      {"addcmul", [](T x) { return at::addcmul(x, x, x.cos(), 0.5) + at::lerp(x, x.sin(), 0.2); }},
      {"functions",
       [](T x) {
         return at::elu(x) + at::leaky_relu(x, 0.1) + at::softplus(x) + at::mish(x) +
                at::hardswish(x) + at::erf(x);
       }},
      {"in place",
       [](T x) {
         return changed(x.clone(), [](at::Tensor& y) {
           y.add_(1).mul_(y.detach().clone()).clamp_(-2, 2);
           y.select(1, 0).mul_(3);
         });
       }},
      {"a view written to",
       [](T x) {
         return changed(x.clone(), [](at::Tensor& y) {
           const at::Tensor view = y.view({12, 24});
           y.mul_(2);
           view.add_(1);
           y = y + view.view_as(y);
         });
       }},
      {"in place, gathered",
       [](T x) {
         return changed(x.clone(), [](at::Tensor& y) {
           y.index_fill_(2, at::tensor({3, 20}, at::kLong), 5);
         });
       },
       gathered},
      {"added to a whole",
       [](T x) { return changed(at::ones_like(x.flip({0})), [&](at::Tensor& y) { y.add_(x); }); },
       gathered},
      {"detach", [](T x) { return x * x.detach() + x; }},
      {"copy",
       [](T x) { return changed(at::zeros_like(x), [&](at::Tensor& y) { y.copy_(x * 2); }); }},
      {"a product of two", [](T x) { return x.matmul(x.transpose(1, 2)); }, gathered},
      {"a loss",
       [](T x) { return torch::nn::functional::mse_loss(x, at::zeros_like(x)).unsqueeze(0); },
       gathered},
      {"sort", [](T x) { return std::get<0>(x.sort(-1)); }, gathered},
      {"einsum",
       [](T x) {
         return at::einsum("bsf,bsf->bs", {x, x});
       },
       gathered},
      {"index",
       [](T x) {
         return x.index({at::tensor({1, 0}, at::kLong), at::tensor({3, 4}, at::kLong)});
       },
       gathered},
      {"norm", [](T x) { return x.norm(2, -1); }, gathered},
      {"random numbers alike", [](T x) { return x * at::rand_like(x); }, gathered},
      {"dropout", [](T x) { return at::dropout(x, 0.4, true); }},
      {"dropout of a transposed", [](T x) { return at::dropout(x.transpose(0, 1), 0.4, true); }},
      {"dropout of heads",
       [](T x) {
         return at::dropout(x.view({2, 6, 4, 6}).transpose(1, 2) * 3, 0.4, true);
       }},
      {"dropout of all", [](T x) { return at::dropout(x, 1, true) + x; }},
      {"dropout that is off", [](T x) { return at::dropout(x, 0.4, false) * 2; }},
      {"dropout in place",
       [](T x) { return changed(x.clone(), [](at::Tensor& y) { at::dropout_(y, 0.4, true); }); }},
      {"feature dropout", [](T x) { return at::feature_dropout(x, 0.4, true); }},
      {"alpha dropout", [](T x) { return at::alpha_dropout(x, 0.4, true); }},
      {"noise",
       [](T x) { return x * at::empty_like(x).bernoulli_(0.5) + at::zeros_like(x).normal_(); }},
      {"a mask of probabilities", [](T x) { return x * at::bernoulli(at::sigmoid(x.detach())); },
       gathered},
  };
  return cases;
}

// Compares a function of a cut column layer's output with the same function of a whole one: values,
// and gradients of the layer's input and of its parameters.
void check_operator(Cells& cells, const OperatorCase& one) {
  torch::manual_seed(11);
  torch::nn::Linear whole(8, 24), cut(8, 24);
  const at::Tensor x = at::randn(one.input, at::kDouble);
  whole->to(at::kDouble);
  cut->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    cut->weight.copy_(whole->weight);
    cut->bias.copy_(whole->bias);
  }
  auto parallelized = parallelize_module(*cut, cells.group(), {{"", Cut::column}});
  const at::Tensor of_whole = nn::leaf(x), of_cut = nn::leaf(x);
  torch::manual_seed(12);
  const at::Tensor wanted = one.function(whole->forward(of_whole));
  torch::manual_seed(12);
  const at::Tensor output = one.function(cut->forward(of_cut));
  cells.expect(output.sizes() == wanted.sizes(), "another shape");
  cells.expect(output.strides() == wanted.strides(),
               fmt::format("strides {} where right is {}", c10::str(output.strides()),
                           c10::str(wanted.strides())));
  if (cells.num_ranks() > 1) {
    const bool gathered = !parallelized.gathers().empty();
    cells.expect(gathered == (one.expected == Expected::gathered),
                 fmt::format("it {}, by {}", gathered ? "gathered" : "did not gather",
                             fmt::join(gathering_operators(parallelized), ", ")));
    if (!gathered) cells.expect(is_cut(output), "the result is not cut");
  }
  torch::manual_seed(13);
  const at::Tensor weights = at::randn(wanted.sizes(), at::kDouble);
  const at::Tensor got = full_tensor(output);
  nn::expect_within(cells, got, wanted, 1e-10, "the result");
  (wanted * weights).sum().backward();
  (got * weights).sum().backward();
  nn::expect_within(cells, of_cut.grad(), of_whole.grad(), 1e-10, "the input's gradient");
  expect_same_plain_gradients(cells, *cut, *whole, 1e-10);
}

// A parameter that every rank has whole, combined with a tensor that is cut, in each possible way.
struct TrainedOperands : torch::nn::Module {
  TrainedOperands()
      : fc1(register_module("fc1", torch::nn::Linear(8, 24))),
        fc2(register_module("fc2", torch::nn::Linear(24, 8))),
        factors(register_parameter("factors", at::linspace(0.5, 2, 24))),
        rows(register_parameter("rows", at::linspace(0.5, 2, 3).unsqueeze(1))),
        scalar(register_parameter("scalar", at::full({}, 0.7))),
        more(register_parameter("more", at::linspace(0.5, 2, 144).view({2, 3, 24}))) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = fc1(x) * factors * rows + scalar;
    return fc2(at::where(y > more, y, more.square() * scalar));
  }

  torch::nn::Linear fc1, fc2;
  at::Tensor factors, rows, scalar, more;
};

}  // namespace

void check_plain_operators(Cells& cells) {
  for (const OperatorCase& one : operator_cases())
    cells.cell("operators of something cut: " + one.name, [&] { check_operator(cells, one); });
  for (const nn::Precision& precision : kPlainPrecisions)
    cells.cell(fmt::format("trained operands, {}", c10::toString(precision.type)), [&] {
      expect_same_training<TrainedOperands>(
          cells,
          {.make = [] { return std::make_shared<TrainedOperands>(); },
           .input = {2, 3, 8},
           .loss = [](TrainedOperands& model, const at::Tensor& x,
                      int) { return uneven_loss(model.forward(x)); },
           .optimizer = momentum},
          precision);
    });
}

}  // namespace lockstep::tensor

#include <lockstep/device/autocast.h>
#include <lockstep/recompute/recompute.h>

#include "parallel_mlp.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

std::shared_ptr<ParallelMLP> make_mlp() { return std::make_shared<ParallelMLP>(8, 24); }

at::Tensor drawn(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
  torch::manual_seed(11);
  return at::randn(shape, type);
}

void expect_same_pass(Cells& cells, ParallelMLP& cut, ParallelMLP& whole, const at::Tensor& x,
                      double tolerance) {
  const at::Tensor of_whole = leaf(x), of_cut = leaf(x);
  const at::Tensor wanted = whole.forward(of_whole), got = cut.forward(of_cut);
  expect_within(cells, got, wanted, tolerance, "the result");
  wanted.pow(2).sum().backward();
  got.pow(2).sum().backward();
  expect_within(cells, of_cut.grad(), of_whole.grad(), tolerance, "the input's gradient");
  expect_same_gradients(cells, cut, whole, tolerance);
}

// The layer is used whole first, and cut while a graph of it and its gradients still exist.
void check_cut_in_use(Cells& cells) {
  torch::manual_seed(3);
  const auto cut = make_mlp();
  torch::manual_seed(3);
  const auto whole = make_mlp();
  const at::Tensor x = drawn({2, 3, 8}, at::kFloat);
  cells.expect_same(cut->forward(x), whole->forward(x), "before it is cut, the result");
  const at::Tensor before = cut->forward(x);
  before.sum().backward({}, /*keep_graph=*/true);
  whole->forward(x).sum().backward();
  cells.expect(cut_parameters(*cut).empty(), "a whole layer has parts");
  cells.expect(cut_parallel_layers(*cut, axis_of(cells)) == 2, "another number of layers");
  expect_same_gradients(cells, *cut, *whole, 0);
  expect_same_pass(cells, *cut, *whole, x, 1e-5);
  for (const CutParameter& part : cut_parameters(*cut))
    cells.expect(part.parameter.numel() == part.placement.elements(),
                 part.name + " has another size than its placement");
}

void check_frozen(Cells& cells, const std::string& frozen) {
  auto [whole, cut] = make_twins(
      [&] {
        auto mlp = make_mlp();
        for (auto& item : mlp->named_parameters())
          if (item.key().find(frozen) != std::string::npos) item.value().requires_grad_(false);
        return mlp;
      },
      at::kDouble, axis_of(cells));
  expect_same_pass(cells, *cut, *whole, drawn({2, 3, 8}), 1e-10);
  // Here the input wants no gradient.
  cut->zero_grad();
  whole->zero_grad();
  const at::Tensor x = drawn({5, 8});
  const at::Tensor wanted = whole->forward(x), got = cut->forward(x);
  cells.expect(got.requires_grad() == wanted.requires_grad(), "another need of a gradient");
  if (!wanted.requires_grad()) return;
  wanted.sum().backward();
  got.sum().backward();
  expect_same_gradients(cells, *cut, *whole, 1e-10);
}

void check_autocast(Cells& cells) {
  auto [whole, cut] = make_twins(make_mlp, at::kFloat, axis_of(cells));
  const device::Autocast autocast(at::kCPU, at::kBFloat16);
  const at::Tensor x = drawn({2, 3, 8}, at::kFloat);
  cells.expect(cut->forward(x).scalar_type() == at::kBFloat16, "nothing was cast");
  expect_same_pass(cells, *cut, *whole, x, 4e-2);
  for (const at::Tensor& parameter : cut->parameters())
    cells.expect(parameter.grad().scalar_type() == at::kFloat, "a gradient of another type");
}

void check_evaluation(Cells& cells) {
  auto [whole, cut] = make_twins(make_mlp, at::kDouble, axis_of(cells));
  const at::Tensor x = drawn({2, 3, 8});
  const at::Tensor trained = cut->forward(x);
  const c10::NoGradGuard no_grad;
  const at::Tensor evaluated = cut->forward(x);
  cells.expect(!evaluated.requires_grad(), "an evaluation has a graph");
  cells.expect_same(evaluated, trained.detach(), "without gradients, the result");
  expect_within(cells, evaluated, whole->forward(x), 1e-10, "the result");
}

void check_recomputed(Cells& cells) {
  const auto twins = make_twins(make_mlp, at::kDouble, axis_of(cells));
  const auto& kept = twins.whole;
  const auto& again = twins.cut;
  cut_parallel_layers(*kept, axis_of(cells));
  const at::Tensor x = leaf(drawn({2, 3, 8})), y = leaf(x);
  kept->forward(x).pow(2).sum().backward();
  recompute([&](const at::Tensor& in) { return again->forward(in); }, y).pow(2).sum().backward();
  cells.expect_same(y.grad(), x.grad(), "recomputed, the input's gradient");
  for (const auto& item : kept->named_parameters())
    cells.expect_same(again->named_parameters()[item.key()].grad(), item.value().grad(),
                      "recomputed, " + item.key());
}

// A layer that the model has under two names is one layer.
struct TwiceUsed : torch::nn::Module {
  TwiceUsed() : mlp(register_module("first", std::make_shared<ParallelMLP>(8, 24))) {
    register_module("second", mlp);
  }
  at::Tensor forward(const at::Tensor& x) { return mlp->forward(at::tanh(mlp->forward(x))); }

  std::shared_ptr<ParallelMLP> mlp;
};

void check_used_twice(Cells& cells) {
  auto [whole, cut] =
      make_twins([] { return std::make_shared<TwiceUsed>(); }, at::kDouble, axis_of(cells));
  const at::Tensor x = drawn({4, 8});
  const at::Tensor wanted = whole->forward(x), got = cut->forward(x);
  expect_within(cells, got, wanted, 1e-10, "the result");
  wanted.sum().backward();
  got.sum().backward();
  expect_same_gradients(cells, *cut->mlp, *whole->mlp, 1e-10);
}

}  // namespace

void check_modules_of_users(Cells& cells) {
  for (const Precision& precision : kPrecisions)
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{2, 3, 8}, {5, 8}, {8}})
      cells.cell(
          fmt::format("a user's module, {} dims, {}", shape.size(), c10::toString(precision.type)),
          [&] {
            auto [whole, cut] = make_twins(make_mlp, precision.type, axis_of(cells));
            expect_same_pass(cells, *cut, *whole, drawn(shape, precision.type),
                             precision.tolerance);
          });
  cells.cell("cut while in use", [&] { check_cut_in_use(cells); });
  for (const char* const frozen :
       {"gate_proj", "down_proj", "weight", "bias", "gate_proj.weight", "proj"})
    cells.cell(fmt::format("frozen: {}", frozen), [&] { check_frozen(cells, frozen); });
  cells.cell("autocast", [&] { check_autocast(cells); });
  cells.cell("evaluation", [&] { check_evaluation(cells); });
  cells.cell("recomputed", [&] { check_recomputed(cells); });
  cells.cell("a layer with two names", [&] { check_used_twice(cells); });
}

}  // namespace lockstep::nn

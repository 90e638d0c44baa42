#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

// An operation that needs all features of an activation.
struct Gathering {
  std::string name;
  Activation activation;
  std::set<std::string> operators;
};

const std::vector<Gathering>& gathering_activations() {
  static const std::vector<Gathering> all = {
      {"layer norm",
       [](const at::Tensor& x) { return at::layer_norm(x, {x.size(-1)}); },
       {"aten::layer_norm"}},
      {"the spread of features",
       [](const at::Tensor& x) { return x * x.std(-1, true, true); },
       {"aten::std"}},
      {"halves",
       [](const at::Tensor& x) {
         const auto halves = x.chunk(2, -1);
         return at::cat({halves[1] * halves[0], halves[0]}, -1);
       },
       {"aten::split"}},
      {"a reversal", [](const at::Tensor& x) { return x.flip({-1}); }, {"aten::flip"}},
      {"a number of it", [](const at::Tensor& x) { return x * x.max(); }, {"aten::max"}},
      {"a mask by index",
       [](const at::Tensor& x) { return x.index_put({x > 0}, at::zeros({}, x.options())); },
       {"aten::index_put"}},
  };
  return all;
}

void check_gathering(Cells& cells, const Gathering& one, const nn::Precision& precision) {
  expect_same_training<PlainMlp>(
      cells,
      {.make = [&] { return std::make_shared<PlainMlp>(one.activation); },
       .input = {2, 3, 8},
       .loss = [](PlainMlp& model, const at::Tensor& x,
                  int) { return uneven_loss(model.forward(x)); },
       .optimizer = momentum,
       .gathers = one.operators},
      precision);
}

// The report names the layer, how often it gathers and how many bytes.
void check_report(Cells& cells) {
  PlainMlp model([](const at::Tensor& x) { return at::layer_norm(x, {x.size(-1)}); });
  auto parallelized = parallelize_module(model, cells.group(), kColumnThenRow);
  cells.expect(parallelized.gathers().empty(), "it gathered before it was used");
  for (int pass = 0; pass < 2; ++pass) model.forward(at::ones({6, 8})).sum().backward();
  const auto all = parallelized.gathers();
  if (cells.num_ranks() == 1) return cells.expect(all.empty(), "one rank gathers");
  cells.expect(all.size() == 1, fmt::format("{} kinds of gathers", all.size()));
  if (all.size() != 1) return;
  cells.expect(all[0].op == "aten::layer_norm" && all[0].source == "fc1",
               fmt::format("gathered by {} of {}", all[0].op, all[0].source));
  cells.expect(all[0].calls == 2 && all[0].bytes == 2 * 6 * 24 * 4,
               fmt::format("{} calls of {} bytes", all[0].calls, all[0].bytes));
  parallelized.forget_gathers();
  cells.expect(parallelized.gathers().empty(), "it does not forget");
}

}  // namespace

void check_plain_gathers(Cells& cells) {
  for (const nn::Precision& precision : kPlainPrecisions)
    for (const Gathering& one : gathering_activations())
      cells.cell(fmt::format("gathers for {}, {}", one.name, c10::toString(precision.type)),
                 [&] { check_gathering(cells, one, precision); });
  cells.cell("what was gathered", [&] { check_report(cells); });
}

}  // namespace lockstep::tensor

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/loss.h>

#include <lockstep/base/error.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;
namespace F = torch::nn::functional;

constexpr std::int64_t kClasses = 24, kRows = 10;

// A loss of scores [rows, classes] for classes [rows].
using LossFunction = std::function<at::Tensor(const at::Tensor& scores, const at::Tensor& classes)>;

struct LossCase {
  std::string name;
  LossFunction loss;
};

at::Tensor class_weights(const at::Tensor& scores) {
  return at::linspace(0.2, 2, kClasses, scores.options());
}

// An image of two by five, with scores for each point.
at::Tensor as_image(const at::Tensor& scores) {
  return scores.view({2, 5, kClasses}).transpose(1, 2);
}

std::vector<LossCase> loss_cases() {
  using T = const at::Tensor&;
  using Options = F::CrossEntropyFuncOptions;
  return {
      {"cross-entropy", [](T x, T y) { return F::cross_entropy(x, y); }},
      {"the sum of cross-entropies",
       [](T x, T y) { return F::cross_entropy(x, y, Options().reduction(torch::kSum)); }},
      {"cross-entropy of each row",
       [](T x, T y) {
         return uneven_loss(F::cross_entropy(x, y, Options().reduction(torch::kNone)));
       }},
      {"cross-entropy with weights and ignored rows",
       [](T x, T y) {
         return F::cross_entropy(x, y.masked_fill(y.remainder(3).eq(0), -7),
                                 Options().weight(class_weights(x)).ignore_index(-7));
       }},
      {"cross-entropy with ignored rows",
       [](T x, T y) { return F::cross_entropy(x, y, Options().ignore_index(y[0].item<long>())); }},
      {"cross-entropy with smooth labels",
       [](T x, T y) {
         return F::cross_entropy(x, y,
                                 Options()
                                     .label_smoothing(0.2)
                                     .ignore_index(y[1].item<long>())
                                     .weight(class_weights(x)));
       }},
      {"cross-entropy for probabilities",
       [](T x, T y) {
         return F::cross_entropy(x,
                                 at::softmax(at::one_hot(y, kClasses).to(x.scalar_type()) * 3, -1));
       }},
      {"cross-entropy of points",
       [](T x, T y) {
         return F::cross_entropy(as_image(x), y.view({2, 5}));
       }},
      {"cross-entropy of one row", [](T x, T y) { return F::cross_entropy(x[3], y[3]); }},
      {"large scores", [](T x, T y) { return F::cross_entropy(x * 3000, y); }},
      {"logarithms of softmax, and their loss",
       [](T x, T y) {
         return F::nll_loss(F::log_softmax(x, 1), y,
                            F::NLLLossFuncOptions().ignore_index(y[2].item<long>()));
       }},
      {"softmax of all", [](T x, T) { return uneven_loss(full_tensor(at::softmax(x, -1))); }},
      {"logarithms of softmax of points",
       [](T x, T) { return uneven_loss(full_tensor(at::log_softmax(as_image(x), 1))); }},
      {"softmax of rows", [](T x, T) { return uneven_loss(full_tensor(at::softmax(x.sin(), 0))); }},
      {"sums",
       [](T x, T) {
         return x.square().mean(-1).sin().sum() + x.exp().sum(0, true).sum({-1, 0}) * 0.1 +
                full_tensor(x.exp().mean(0).sum(-1)) + x.tanh().mean();
       }},
      {"means of some",
       [](T x, T) {
         return uneven_loss(full_tensor(as_image(x).mean(at::IntArrayRef{0, 2}))) +
                uneven_loss(full_tensor(as_image(x).sum(0)));
       }},
  };
}

at::Tensor classes_of(const at::Tensor& x, int number) {
  return (at::arange(kRows, x.options().dtype(at::kLong)) * (number + 5) + 1).remainder(kClasses);
}

void check_loss(Cells& cells, const LossCase& one, const nn::Precision& precision) {
  using Head = torch::nn::LinearImpl;
  expect_same_training<Head>(
      cells,
      {.make = [] { return std::make_shared<Head>(8, kClasses); },
       .plan = {{"", Cut::column}},
       .input = {kRows, 8},
       .loss = [&](Head& head, const at::Tensor& x,
                   int number) { return one.loss(head.forward(x), classes_of(x, number)); },
       .optimizer = momentum},
      precision);
}

// The head shares the table's weights: a part of the tokens is a part of the classes.
struct TiedWords : torch::nn::Module {
  TiedWords() : table(register_module("table", torch::nn::Embedding(kClasses, 8))) {}

  at::Tensor forward(const at::Tensor& words, const at::Tensor& x) {
    return at::matmul(at::tanh(table(words) + x), table->weight.t());
  }

  torch::nn::Embedding table;
};

void check_tied(Cells& cells, const nn::Precision& precision) {
  expect_same_training<TiedWords>(
      cells,
      {.make = [] { return std::make_shared<TiedWords>(); },
       .plan = {{"table", Cut::row}},
       .input = {2, 5, 8},
       .loss =
           [](TiedWords& model, const at::Tensor& x, int number) {
             const at::Tensor words = classes_of(x, number).view({2, 5});
             const at::Tensor scores = model.forward(words, x);
             return F::cross_entropy(scores.view({-1, kClasses}), words.flatten().flip({0}));
           },
       .optimizer = momentum},
      precision);
}

// Three numbers a row go over the ranks, and backward sends the gradient of the input alone.
void check_loss_traffic(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  const auto group = cells.group()->split(0, cells.rank(), "counted loss");
  const auto calls_of = [&](const std::function<void()>& body) {
    const auto before = group->recorder().last_sequence();
    body();
    std::string calls;
    for (const flight::Entry& entry : group->recorder().entries())
      if (entry.sequence > before) calls += entry.summary.substr(entry.summary.find('(')) + " ";
    return calls;
  };
  torch::nn::Linear head(8, kClasses);
  parallelize_module(*head, group, {{"", Cut::column}});
  const at::Tensor x = at::ones({kRows, 8}).requires_grad_();
  at::Tensor loss;
  const std::string forward =
      calls_of([&] { loss = F::cross_entropy(head->forward(x), classes_of(x, 1)); });
  cells.expect(forward == "(max of 10 float32) (sum of 20 float32) ",
               "forward asks for " + forward);
  const std::string backward = calls_of([&] { loss.backward(); });
  cells.expect(backward == "(sum of 80 float32) ", "backward asks for " + backward);
}

void check_class_out_of_range(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  torch::nn::Linear head(8, kClasses);
  parallelize_module(*head, cells.group(), {{"", Cut::column}});
  const at::Tensor scores = head->forward(at::ones({2, 8}));
  for (const std::int64_t wrong : {kClasses, std::int64_t{-1}})
    cells.expect_usage_error(
        [&] {
          F::cross_entropy(scores, at::tensor({std::int64_t{3}, wrong}));
        },
        fmt::format("scores of {} classes", kClasses));
}

// The loss is in float32 even if scores are not.
void check_short_scores(Cells& cells) {
  torch::manual_seed(3);
  torch::nn::Linear head(8, kClasses), whole(8, kClasses);
  {
    const torch::NoGradGuard no_grad;
    whole->weight.copy_(head->weight);
    whole->bias.copy_(head->bias);
  }
  parallelize_module(*head, cells.group(), {{"", Cut::column}});
  const at::Tensor x = at::randn({kRows, 8}), classes = classes_of(x, 3);
  const auto loss = [&](torch::nn::Linear& layer) {
    const at::Tensor scores = layer(x).to(at::kBFloat16);
    return F::nll_loss(at::log_softmax(scores, -1, at::kFloat), classes);
  };
  const at::Tensor got = loss(head), wanted = loss(whole);
  cells.expect(got.scalar_type() == at::kFloat, "another type");
  nn::expect_within(cells, got, wanted, 1e-5, "the loss of short scores");
  const at::Tensor direct = F::cross_entropy(head(x).to(at::kBFloat16), classes);
  cells.expect(direct.scalar_type() == at::kBFloat16, "cross-entropy has another type");
  nn::expect_within(cells, direct.to(at::kFloat), wanted, 1e-2, "cross-entropy of short scores");
}

}  // namespace

void check_plain_losses(Cells& cells) {
  for (const nn::Precision& precision : kPlainPrecisions) {
    for (const LossCase& one : loss_cases())
      cells.cell(fmt::format("{}, {}", one.name, precision.text()),
                 [&] { check_loss(cells, one, precision); });
    cells.cell(fmt::format("tied words, {}", precision.text()),
               [&] { check_tied(cells, precision); });
  }
  cells.cell("what a loss sends", [&] { check_loss_traffic(cells); });
  cells.cell("a class out of range", [&] { check_class_out_of_range(cells); });
  cells.cell("short scores", [&] { check_short_scores(cells); });
}

}  // namespace lockstep::tensor

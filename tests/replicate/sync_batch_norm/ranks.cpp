#include "ranks.h"

#include <numeric>
#include <optional>
#include <sstream>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/sync_batch_norm.h>

namespace lockstep::replicate {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

using Counts = std::vector<std::int64_t>;  // samples of each rank

std::int64_t sum_until(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

at::Tensor share(const Cells& cells, const at::Tensor& whole, const Counts& counts) {
  return whole.narrow(0, sum_until(counts, cells.rank()),
                      counts[static_cast<std::size_t>(cells.rank())]);
}

template <typename Norm>
Norm make_norm(const nn::BatchNormOptions& options) {
  Norm norm(options);
  if (norm->weight.defined()) {
    const c10::NoGradGuard no_grad;
    norm->weight.copy_(at::linspace(0.5, 2, options.num_features()));
    norm->bias.copy_(at::linspace(-1, 1, options.num_features()));
  }
  return norm;
}

// Compares several steps of a norm over ranks with these numbers of samples with LibTorch's norm
// over all samples.
template <typename Norm>
void compare(Cells& cells, const nn::BatchNormOptions& options, const Counts& counts,
             std::vector<std::int64_t> shape) {
  Norm norm = make_norm<Norm>(options);
  Norm reference = make_norm<Norm>(options);
  const SyncBatchNorm synced(*norm, *cells.group());
  shape.insert(shape.begin(), sum_until(counts, cells.num_ranks()));
  torch::manual_seed(3);
  for (int step = 0; step < 3; ++step) {
    at::Tensor whole = (at::randn(shape) * 3 + 5).requires_grad_();
    const at::Tensor slopes = at::randn(shape);
    const at::Tensor wanted = reference->forward(whole);
    (wanted * slopes).sum().backward();

    at::Tensor mine = share(cells, whole.detach(), counts).clone().requires_grad_();
    const at::Tensor got = norm->forward(mine);
    (got * share(cells, slopes, counts)).sum().backward();
    cells.expect_close(got, share(cells, wanted, counts), "the output");
    cells.expect_close(mine.grad(), share(cells, whole.grad(), counts), "the input's gradient");
    cells.expect(norm->is_training(), "the module forgot that it trains");
    for (const auto& item : norm->named_parameters()) {
      cells.group()->all_reduce(item.value().grad()).wait();
      cells.expect_close(item.value().grad(), reference->named_parameters()[item.key()].grad(),
                         "the gradient of " + item.key());
    }
    norm->zero_grad();
    reference->zero_grad();
    for (const auto& item : norm->named_buffers())
      cells.expect_close(item.value(), reference->named_buffers()[item.key()], item.key());
  }
}

void check_numbers(Cells& cells) {
  struct Kind {
    std::string name;
    nn::BatchNormOptions options;
  };
  const std::vector<Kind> kinds = {
      {"plain", nn::BatchNormOptions(4)},
      {"cumulative", nn::BatchNormOptions(4).momentum(c10::nullopt)},
      {"without weights", nn::BatchNormOptions(4).affine(false)},
  };
  for (const auto& [name, options] : kinds) {
    cells.cell(name + ", one sample a rank", [&, &o = options] {
      compare<nn::BatchNorm1d>(cells, o, {1, 1, 1}, {4});
    });
    cells.cell(name + ", one sample on two ranks", [&, &o = options] {
      compare<nn::BatchNorm1d>(cells, o, {1, 3, 1}, {4});
    });
    cells.cell(name + ", a rank without samples", [&, &o = options] {
      compare<nn::BatchNorm1d>(cells, o, {0, 2, 1}, {4});
    });
    cells.cell(name + ", 2d", [&, &o = options] {
      compare<nn::BatchNorm2d>(cells, o, {2, 1, 4}, {4, 3, 2});
    });
    cells.cell(name + ", 3d", [&, &o = options] {
      compare<nn::BatchNorm3d>(cells, o, {1, 1, 2}, {4, 1, 1, 1});
    });
  }
  cells.cell("without running statistics", [&] {
    compare<nn::BatchNorm1d>(cells, nn::BatchNormOptions(4).track_running_stats(false), {2, 3, 4},
                             {4});
  });
}

// LibTorch's answer; nothing if it throws.
std::optional<at::Tensor> plainly(const std::function<at::Tensor()>& compute) {
  try {
    return compute();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

void check_types(Cells& cells) {
  cells.cell("16-bit samples and weights of 32", [&] {
    nn::BatchNorm1d norm = make_norm<nn::BatchNorm1d>(nn::BatchNormOptions(4));
    nn::BatchNorm1d reference = make_norm<nn::BatchNorm1d>(nn::BatchNormOptions(4));
    const SyncBatchNorm synced(*norm, *cells.group());
    const Counts counts = {3, 5, 1};
    torch::manual_seed(4);
    const at::Tensor exact = (at::randn({9, 4}) + 2).to(at::kBFloat16);
    at::Tensor mine = share(cells, exact, counts).clone().requires_grad_();
    const at::Tensor got = norm->forward(mine);
    cells.expect(got.scalar_type() == at::kBFloat16, "the output is not of the input's type");
    // Computed on float samples and rounded, as LibTorch's kernel for 16 bits does if it has one.
    const at::Tensor wanted = reference->forward(exact.to(at::kFloat)).to(at::kBFloat16);
    cells.expect((got.to(at::kFloat) - share(cells, wanted, counts).to(at::kFloat))
                         .abs()
                         .max()
                         .item<float>() < 0.02f,
                 "the output is wrong");
    got.to(at::kFloat).pow(3).sum().backward();
    cells.expect(mine.grad().scalar_type() == at::kBFloat16,
                 "the input's gradient has another type");
    cells.expect(norm->weight.grad().scalar_type() == at::kFloat,
                 "the weight's gradient has another type");
    const auto libtorch = plainly(
        [&] { return make_norm<nn::BatchNorm1d>(nn::BatchNormOptions(4))->forward(exact); });
    if (libtorch)
      cells.expect(libtorch->scalar_type() == got.scalar_type(), "LibTorch's has another type");
  });
}

void check_evaluation(Cells& cells) {
  // If one rank's evaluation took part in communication, it would wait forever for ranks that do
  // not call, or mix in their samples.
  for (const bool tracked : {true, false})
    cells.cell(fmt::format("evaluation of one rank, statistics {}", tracked ? "kept" : "not kept"),
               [&] {
                 const auto options = nn::BatchNormOptions(4).track_running_stats(tracked);
                 nn::BatchNorm1d norm = make_norm<nn::BatchNorm1d>(options);
                 nn::BatchNorm1d reference = make_norm<nn::BatchNorm1d>(options);
                 const SyncBatchNorm synced(*norm, *cells.group());
                 norm->eval();
                 reference->eval();
                 const at::Tensor input = at::randn({5, 4}) + cells.rank();
                 if (cells.rank() == 1)
                   cells.expect_same(norm->forward(input), reference->forward(input), "the output");
                 cells.expect(!norm->is_training(), "the module trains");
               });
  cells.cell("LibTorch's own once it is gone", [&] {
    nn::BatchNorm1d norm(4);
    nn::BatchNorm1d reference(4);
    { const SyncBatchNorm synced(*norm, *cells.group()); }
    const at::Tensor input = at::randn({2 + cells.rank(), 4});
    cells.expect_same(norm->forward(input), reference->forward(input), "the output");
    cells.expect_same(norm->running_var, reference->running_var, "the running variance");
    cells.expect(!plainly([&] {
      return norm->forward(at::ones({1, 4}));
    }),
                 "one value per channel was taken");
  });
}

void check_mistakes(Cells& cells) {
  cells.cell("one value per channel over all ranks", [&] {
    nn::Sequential net(nn::BatchNorm1d(4));
    const SyncBatchNorm synced(*net, *cells.group());
    const at::Tensor input = at::ones({cells.rank() == 2 ? 1 : 0, 4});
    cells.expect_usage_error([&] { net->forward(input); },
                             "the batch norm '0' got 1 value per channel over all ranks");
    cells.expect(net[0]->is_training(), "the module forgot that it trains");
    // The group still works: the next batch may be larger.
    cells.expect(net->forward(at::ones({1, 4})).abs().max().item<float>() == 0, "is not normal");
  });
  cells.cell("a model that is loaded afterwards", [&] {
    nn::Sequential net(nn::BatchNorm1d(4));
    SyncBatchNorm synced(*net, *cells.group());
    const auto loss = [&] { return net->forward(at::randn({3, 4})).sum(); };
    loss().backward();
    std::stringstream file;
    torch::save(nn::Sequential(nn::BatchNorm1d(4)), file);
    torch::load(net, file);
    cells.expect_usage_error([&] { loss().backward(); }, "the batch norm '0' was loaded");
    net->eval();
    loss().backward();
    net->train();
    synced.renew();
    loss().backward();
  });
  cells.cell("nothing to recognise it by", [&] {
    nn::Sequential net(
        nn::BatchNorm1d(nn::BatchNormOptions(4).affine(false).track_running_stats(false)));
    cells.expect_usage_error([&] { SyncBatchNorm(*net, *cells.group()); },
                             "the batch norm '0' has neither weights nor running statistics");
  });
  cells.cell("what is converted", [&] {
    nn::BatchNorm1d norm(4);
    auto net = std::make_unique<nn::Sequential>(norm, norm, nn::BatchNorm2d(3));
    nn::Sequential other(nn::BatchNorm1d(4));
    const SyncBatchNorm synced(**net, *cells.group());
    cells.expect(synced.num_converted() == 2, "one that is there twice counts once");
    cells.expect(synced.converted_any_of(**net) && synced.converted_any_of(*norm), "not known");
    cells.expect(!synced.converted_any_of(*other), "another module's are known");
    net.reset();
    cells.expect(!synced.expired(), "one of them is still there");
    norm = nullptr;
    cells.expect(synced.expired(), "none of them is there");
  });
}

}  // namespace

void check_batch_norms(Cells& cells) {
  check_numbers(cells);
  check_types(cells);
  check_evaluation(cells);
  check_mistakes(cells);
}

}  // namespace lockstep::replicate

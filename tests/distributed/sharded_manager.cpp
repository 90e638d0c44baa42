#include "sharded_manager.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <lockstep/parallel/data_parallel/model_parameters.h>

#include "same_state.h"

namespace lockstep {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

// Blocks of 270 kB, which are large enough to be deferred, and a buffer.
struct NetImpl : nn::Module {
  nn::Sequential blocks{nullptr};
  nn::Linear head{nullptr};
  nn::BatchNorm1d norm{nullptr};
  NetImpl() {
    blocks = register_module("blocks", nn::Sequential());
    for (int i = 0; i < 3; ++i) blocks->push_back(nn::Linear(260, 260));
    norm = register_module("norm", nn::BatchNorm1d(260));
    head = register_module("head", nn::Linear(260, 100));
    const c10::NoGradGuard no_grad;
    head->weight.normal_(0, 0.02);
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(blocks->forward(x))); }
};
TORCH_MODULE(Net);

at::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

void train(DistributedManager& dist, Net& model, int steps) {
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(10 * step + dist.rank()));
    adamw->zero_grad();
    model->forward(at::randn({6, 260})).pow(2).mean().backward();
    dist.clip_gradients(model, 0.5);
    adamw->step(0.01);
  }
}

void check_building(DistributedManager& dist, Cells& cells) {
  cells.cell("a model that is built in parts is the one that is built as a whole", [&] {
    torch::manual_seed(5);
    Net plain;
    const at::Tensor after = generator_state();
    plain = dist.wrap_model(plain);
    // Only the first rank's values matter.
    torch::manual_seed(static_cast<std::uint64_t>(5 + dist.rank()));
    Net built = dist.build_model([] { return Net(); });
    if (dist.is_main()) cells.expect_same(generator_state(), after, "the generator's state");
    expect_same_state(cells, dist.full_state_dict(built, kEveryRank),
                      dist.full_state_dict(plain, kEveryRank));
    train(dist, built, 3);
    train(dist, plain, 3);
    expect_same_state(cells, dist.full_state_dict(built, kEveryRank),
                      dist.full_state_dict(plain, kEveryRank));
  });
  cells.cell("a constructor that throws", [&] {
    struct Broken : nn::Module {
      Broken() {
        register_module("layer", nn::Linear(300, 300));
        throw std::runtime_error("not today");
      }
    };
    bool threw = false;
    try {
      dist.build_model([] { return std::make_shared<Broken>(); });
    } catch (const std::runtime_error&) {
      threw = true;
    }
    cells.expect(threw, "the constructor's exception is lost");
    cells.expect(at::ones({300, 300}).sum().item<float>() == 90000,
                 "factories are not plain again");
  });
  cells.cell("a model by value", [&] {
    struct Plain : nn::Module {
      nn::Linear layer = register_module("layer", nn::Linear(300, 300));
    };
    const auto model = dist.build_model([] { return Plain(); });
    cells.expect(dist.is_wrapped(model), "it is not wrapped");
  });
}

void check_describing(DistributedManager& dist, Cells& cells) {
  cells.cell("what is said of a model", [&] {
    Net model = dist.wrap_model(Net());
    const std::string text = dist.describe(model);
    for (const char* part :
         {"blocks.0", "blocks.2", "on each rank, gathered when used", "230200 parameters in all"})
      cells.expect(text.find(part) != text.npos, fmt::format("'{}' is not in\n{}", part, text));
    train(dist, model, 1);
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
    const MemoryReport report = dist.memory_report(model);
    cells.expect(report.num_ranks == cells.num_ranks(), "the number of ranks");
    const double wanted = 16.0 * static_cast<double>(report.num_parameters) / cells.num_ranks();
    cells.expect(std::abs(static_cast<double>(report.at_rest()) / wanted - 1) < 0.02,
                 fmt::format("{} bytes at rest, {} by the formula:\n{}", report.at_rest(), wanted,
                             report.text()));
  });
  cells.cell("a whole gradient, and parameters through pointers", [&] {
    Net model = dist.wrap_model(Net());
    model->forward(at::ones({2, 260})).sum().backward();
    const at::Tensor gradient = dist.full_gradient(model, "head.bias");
    cells.expect_same(gradient, at::full({100}, 2.0f), "the gradient of a bias");
    cells.expect_usage_error([&] { dist.full_gradient(model, "head.biass"); },
                             "no parameter 'head.biass'");
    const auto whole = dist.full_parameters(model);
    const at::Tensor weight = model->head->weight.detach().clone();
    cells.expect(std::equal(weight.data_ptr<float>(), weight.data_ptr<float>() + weight.numel(),
                            model->head->weight.data_ptr<float>()),
                 "other values behind the pointer");
  });
}

void check_optimizers(DistributedManager& dist, Cells& cells) {
  cells.cell("an optimizer of another model's parameters", [&] {
    Net model = dist.wrap_model(Net());
    Net other = dist.wrap_model(Net());
    cells.expect_usage_error(
        [&] {
          dist.make_optimizer(model, optim::AdamWOptions{},
                              optim::decay_groups(data_parallel::trained_parameters(*other), 0.1));
        },
        "is no parameter of");
  });
  cells.cell("its state goes out and in", [&] {
    Net model = dist.wrap_model(Net());
    train(dist, model, 1);
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
    model->forward(at::ones({2, 260})).sum().backward();
    adamw->step(0.1);
    const auto state = dist.full_optimizer_state(model, *adamw);
    cells.expect(dist.is_main() ? !state.empty() : state.empty(), "it is the main rank's");
    const auto again = dist.make_optimizer(model, optim::AdamWOptions{});
    dist.load_full_optimizer_state(model, *again, state);
    expect_same_state(cells, dist.full_optimizer_state(model, *again, kEveryRank),
                      dist.full_optimizer_state(model, *adamw, kEveryRank));
  });
}

}  // namespace

void check_sharded_manager(DistributedManager dist, Cells& cells) {
  check_building(dist, cells);
  check_describing(dist, cells);
  check_optimizers(dist, cells);
}

}  // namespace lockstep

#include "behaviour.h"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>

namespace lockstep::replicate {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

// Two layers, used in an order of the caller's.
struct TwoImpl : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  explicit TwoImpl(std::int64_t width = 4) {
    first = register_module("first", nn::Linear(width, width));
    second = register_module("second", nn::Linear(width, width));
  }
};
TORCH_MODULE(Two);

void check_agreement(Cells& cells) {
  cells.cell("a shape that differs is named on every rank", [&] {
    Two model(cells.rank() == 2 ? 5 : 4);
    cells.expect_usage_error(
        [&] { DistributedDataParallel(*model, cells.group()); },
        "the model of rank 2 differs from that of rank 0, which has 4 tensors where it has 4: "
        "tensor 0 is 'first.weight' (Float of shape [4, 4]) on rank 0 and 'first.weight' (Float of "
        "shape [5, 5]) on rank 2");
  });
  cells.cell("a tensor that is missing is named on every rank", [&] {
    nn::Sequential model(nn::Linear(2, 2));
    if (cells.rank() == 1) model->push_back(nn::Linear(2, 3));
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "tensor 2 is nothing on rank 0 and '1.weight'");
  });
  cells.cell("what is frozen must be frozen everywhere", [&] {
    Two model;
    if (cells.rank() == 1) model->first->weight.requires_grad_(false);
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "(Float of shape [4, 4], not trained)");
  });
  cells.cell("a module without parameters is refused", [&] {
    nn::Sequential model;
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "there is nothing to train");
  });
  cells.cell("every rank starts from the weights of rank 0", [&] {
    torch::manual_seed(static_cast<std::uint64_t>(cells.rank()));
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    torch::manual_seed(0);
    const Two expected;
    cells.expect_same(model->second->weight, expected->second->weight, "the weight");
  });
}

void check_gradients(Cells& cells) {
  cells.cell("sparse gradients are refused", [&] {
    nn::Embedding model(nn::EmbeddingOptions(5, 3).sparse(true));
    DistributedDataParallel parallel(*model, cells.group());
    cells.expect_usage_error([&] { model->forward(at::arange(2)).sum().backward(); },
                             "the gradient of 'weight' is sparse");
  });
  cells.cell("gradients that are part of a graph are refused", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor loss = model->first(at::ones({1, 4})).pow(2).sum();
    cells.expect_usage_error([&] { loss.backward({}, c10::nullopt, /*create_graph=*/true); },
                             "create_graph");
  });
  cells.cell("gradients that were not zeroed are noticed", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    parallel.backward(loss(), 1);
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "call zero_grad()");
  });
  cells.cell("without a loss or with a vector of losses", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    cells.expect_usage_error([&] { parallel.backward({}, 3); }, "over 3 samples without a loss");
    cells.expect_usage_error(
        [&] {
          parallel.backward(model->first(at::ones({1, 4})), 1);
        },
        "of shape [1, 4]");
  });
  cells.cell("a loss that meets no parameter does not keep the others waiting", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor ones = at::ones({1, 4});
    parallel.backward(cells.rank() == 1 ? at::zeros({}) : model->first(ones).sum(), 1);
    cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0f) / 3, "the gradient");
    cells.expect_same(model->second->bias.grad(), {}, "the gradient of what no rank used");
  });
}

void check_order(Cells& cells) {
  cells.cell("buckets follow the order in which gradients come", [&] {
    Two model;
    std::vector<std::string> order;
    Options options;
    options.buckets = {.first_bytes = 1, .bytes = 1};  // a bucket for each
    options.comm_hook = [&](GradientBucket& bucket, comm::Communicator& group) {
      order.push_back(bucket.parameters.front());
      return [work = group.all_reduce(bucket.flat)]() mutable { work.wait(); };
    };
    DistributedDataParallel parallel(*model, cells.group(), options);
    // Used against the order of registration, so that `first` is ready first.
    const auto step = [&] {
      model->first(model->second(at::ones({2, 4}) * (cells.rank() + 1))).mean().backward();
    };
    step();
    cells.expect(order[0].starts_with("second."), "the first step took another order");
    order.clear();
    step();
    cells.expect(order.size() == 4 && order[0].starts_with("first.") &&
                     order[1].starts_with("first.") && order[3].starts_with("second."),
                 "the second step did not follow the first's order");
  });
  cells.cell("a hook's sums become means", [&] {
    Two model;
    Options options;
    options.comm_hook = [](GradientBucket& bucket, comm::Communicator& group) {
      return [work = group.all_reduce(bucket.flat)]() mutable { work.wait(); };
    };
    DistributedDataParallel parallel(*model, cells.group(), options);
    (model->first->bias.sum() * (cells.rank() + 1)).backward();
    cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0f), "the mean of 1, 2 and 3");
  });
  cells.cell("a model of two dtypes", [&] {
    Two model;
    model->second->to(at::kDouble);
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor hidden = model->first(at::ones({1, 4})).to(at::kDouble);
    (model->second(hidden).sum() * (cells.rank() + 1)).backward();
    cells.expect_same(model->second->bias.grad(), at::full({4}, 2.0, at::kDouble),
                      "the gradient in float64");
  });
  cells.cell("gradients stay local once it is gone", [&] {
    Two model;
    { const DistributedDataParallel parallel(*model, cells.group()); }
    (model->first->bias.sum() * cells.rank()).backward();
    cells.expect_same(model->first->bias.grad(), at::full({4}, static_cast<float>(cells.rank())),
                      "the gradient");
  });
}

}  // namespace

void check_behaviour(Cells& cells) {
  check_agreement(cells);
  check_gradients(cells);
  check_order(cells);
}

void check_refusal(Cells& cells) {
  cells.cell("what got no gradient is named", [&] {
    Two model;
    Options options;
    options.find_unused_parameters = false;
    DistributedDataParallel parallel(*model, cells.group(), options);
    const at::Tensor ones = at::ones({1, 4});
    const auto step = [&] {
      const at::Tensor hidden = model->first(ones);
      (cells.rank() == 0 ? model->second(hidden) : hidden).sum().backward();
    };
    if (cells.rank() == 1)
      return cells.expect_usage_error(step, "no gradient reached 'second.weight', 'second.bias'");
    try {
      step();
      cells.expect(false, "the other rank waited for nothing");
    } catch (const CommError& error) {
      cells.expect(std::string(error.what()).find("'second.weight'") != std::string::npos,
                   fmt::format("the other rank was told '{}'", error.what()));
    }
  });
}

}  // namespace lockstep::replicate

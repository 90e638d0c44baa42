#include <thread>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include "tables.h"
#include "twins.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

void check_uses(Cells& cells) {
  cells.cell("units used by turns, then both at once", [&] {
    for (const std::size_t max_live : {1u, 2u, 3u})
      Twins<Chain>(cells, two_layers, {.max_live_units = max_live})
          .train([](Chain& model, const at::Tensor& input) {
            at::Tensor hidden = input;
            for (int turn = 0; turn < 3; ++turn)
              hidden = model->layer(1).forward(at::tanh(model->layer(0).forward(hidden)));
            return hidden.matmul(at::cat({model->layer(0).weight, model->layer(1).weight}, 1))
                .pow(2)
                .mean();
          });
  });
  cells.cell("an operator on more units than may be there", [&] {
    Twins<Chain>(
        cells, [] { return Chain(4); }, kOneAtATime)
        .train([](Chain& model, const at::Tensor& input) {
          std::vector<at::Tensor> weights;
          for (std::size_t layer = 0; layer < 4; ++layer)
            weights.push_back(model->layer(layer).weight);
          return input.matmul(at::stack(weights).sum(0)).pow(2).mean();
        });
  });
  cells.cell("two forwards before one backward", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train([](Chain& model, const at::Tensor& input) {
      const at::Tensor first = model->forward(input);
      const at::Tensor second = model->forward(input * 2 + 1);
      return (first * second).mean();
    });
  });
  cells.cell("views of a parameter, used after others were", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train([](Chain& model, const at::Tensor& input) {
      const at::Tensor view = model->layer(0).weight.t().slice(0, 1, 4);
      const at::Tensor detached = model->layer(0).weight.detach();
      const at::Tensor row = model->layer(1).bias.unsqueeze(0).expand({3, 5});
      const at::Tensor hidden = model->forward(input);
      return (hidden.slice(1, 0, 3).matmul(view) + row + hidden.matmul(detached)).pow(2).mean();
    });
  });
  cells.cell("forward on another thread", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train([](Chain& model, const at::Tensor& input) {
      at::Tensor loss;
      std::thread([&] { loss = forward_loss(model, input); }).join();
      return loss;
    });
  });
  cells.cell("hooks of the user's on activations and parameters", [&] {
    Twins<Chain> twins(cells, three_layers, kOneAtATime);
    for (Chain* const model : {&twins.model(), &twins.twin()})
      (*model)->layer(1).weight.register_hook(
          [](const at::Tensor& gradient) { return gradient * 3; });
    twins.train([](Chain& model, const at::Tensor& input) {
      const at::Tensor hidden = model->layer(0).forward(input);
      hidden.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
      return model->layer(2).forward(model->layer(1).forward(hidden)).pow(2).mean();
    });
  });
  cells.cell("a hook that uses the model itself", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train([](Chain& model, const at::Tensor& input) {
      const at::Tensor hidden = model->layer(1).forward(model->layer(0).forward(input));
      hidden.register_hook([&model](const at::Tensor& gradient) {
        return gradient + model->layer(0).weight.detach().sum();
      });
      return model->layer(2).forward(hidden).pow(2).mean();
    });
  });
  cells.cell("a part of the model that no rank uses", [&] {
    Twins<Chain>(cells, three_layers).train([](Chain& model, const at::Tensor& input) {
      return model->layer(2).forward(model->layer(0).forward(input)).pow(2).mean();
    });
  });
  cells.cell("another part of the model in every other step", [&] {
    int step = 0;
    Twins<Chain>(cells, three_layers).train([&](Chain& model, const at::Tensor& input) {
      const std::size_t layer = step++ / 2 % 2 == 0 ? 1 : 2;  // the twin's pass comes second
      return model->layer(layer).forward(model->layer(0).forward(input)).pow(2).mean();
    });
  });
}

// A layer's output, computed a second time in backward by a backward inside of it.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            nn::LinearImpl* layer) {
    context->save_for_backward({input});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return layer->forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const c10::AutoGradMode grad(true);
    auto* const layer = reinterpret_cast<nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    layer->forward(input).backward(gradients[0]);
    return {input.grad(), at::Tensor()};
  }
};

// Has several inputs and outputs, parameters of its own, and containers inside of containers.
struct OddImpl : nn::Module {
  nn::ModuleDict parts;
  nn::ModuleList stages;
  at::Tensor scale, shift, none;
  OddImpl() {
    scale = register_parameter("scale", at::randn({5}));
    none = register_parameter("none", at::zeros({0, 3}));
    register_module("parts", parts);
    parts->update({{"words", nn::Embedding(7, 5).ptr()}, {"mix", nn::Linear(5, 5).ptr()}});
    register_module("stages", stages);
    stages->push_back(nn::Sequential(nn::Linear(5, 3), nn::Linear(3, 5)));
    stages->push_back(nn::Sequential(nn::Linear(5, 4), nn::Linear(4, 5)));
    shift = register_parameter("shift", at::randn({}));
  }
  struct Outputs {
    at::Tensor mixed;
    std::vector<at::Tensor> others;
  };
  Outputs forward(const at::Tensor& values, const at::Tensor& words) {
    const at::Tensor looked_up = parts["words"]->as<nn::Embedding>()->forward(words);
    const at::Tensor mixed = parts["mix"]->as<nn::Linear>()->forward(values * scale + looked_up);
    at::Tensor staged = mixed;
    for (std::size_t stage = 0; stage < 2; ++stage)
      staged = stages->ptr<nn::SequentialImpl>(stage)->forward(staged);
    return {mixed + shift, {staged, looked_up * shift}};
  }
};
TORCH_MODULE(Odd);

void check_shapes(Cells& cells) {
  cells.cell("several inputs and outputs, parameters of its own, nested containers", [&] {
    for (const UnitPolicy& units :
         {UnitPolicy(), units_of_types<nn::LinearImpl>(), units_of_size(1), one_unit()})
      Twins<Odd>(cells, [] { return Odd(); }, {.units = units, .max_live_units = 1})
          .train([](Odd& model, const at::Tensor& input) {
            const auto outputs = model->forward(input, at::tensor({6, 0, 6}, at::kLong));
            return outputs.mixed.pow(2).mean() + outputs.others[0].abs().sum() +
                   outputs.others[1].exp().mean();
          });
  });
  cells.cell("a parameter that is not contiguous", [&] {
    Twins<Chain> twins(cells, [] {
      Chain model(2);
      model->layer(0).weight.set_data(at::randn({5, 5}).t());
      return model;
    });
    // The sharded weight is contiguous; products with other strides may have other bits.
    at::Tensor& weight = twins.twin()->layer(0).weight;
    weight.set_data(weight.detach().contiguous());
    twins.train(forward_loss);
  });
  cells.cell("a parameter inside of a unit that one rank alone uses", [&] {
    struct GatedImpl : nn::Module {
      nn::Linear layer{4, 4};
      at::Tensor gate = register_parameter("gate", at::ones({4}));
      GatedImpl() { register_module("layer", layer); }
      at::Tensor forward(const at::Tensor& hidden, bool gated) {
        const at::Tensor output = at::tanh(layer(hidden));
        return gated ? output * gate : output;
      }
    };
    struct GatesImpl : nn::Module {
      nn::ModuleList blocks;
      GatesImpl() {
        register_module("blocks", blocks);
        for (int i = 0; i < 7; ++i) blocks->push_back(std::make_shared<GatedImpl>());
      }
    };
    GatesImpl model;
    FullyShardedDataParallel parallel(model, shard_over(cells.group()), scrubbed());
    const auto optimizer = adamw(parallel, model);
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      at::Tensor hidden = input_of(cells, step, 4);
      for (std::size_t i = 0; i < 7; ++i)
        hidden = model.blocks->ptr<GatedImpl>(i)->forward(hidden, i != 5 || cells.rank() == 0);
      hidden.pow(2).mean().backward();
      for (const char* name : {"blocks.5.gate", "blocks.4.gate"})
        cells.expect(parallel.full_gradient(name).abs().sum().item<float>() > 0,
                     std::string(name) + " has no gradient");
      optimizer->step(0.01);
    }
  });
  cells.cell("a recomputed layer: a backward inside of the backward", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train([](Chain& model, const at::Tensor& input) {
      const at::Tensor hidden = at::tanh(model->layer(0).forward(input));
      return model->layer(2).forward(Again::apply(hidden, &model->layer(1))).pow(2).mean();
    });
  });
  cells.cell("fewer elements than ranks", [&] {
    struct TinyImpl : nn::Module {
      at::Tensor one;
      TinyImpl() { one = register_parameter("one", at::randn({1})); }
    };
    struct Tiny : nn::ModuleHolder<TinyImpl> {};
    Twins<Tiny>(cells, [] { return Tiny(); }).train([](Tiny& model, const at::Tensor& input) {
      return (input * model->one).mean();
    });
  });
  cells.cell("synchronised batch norms", [&] {
    const auto make = [&] {
      return nn::Sequential(nn::Linear(5, 6), nn::BatchNorm1d(6), nn::Linear(6, 5),
                            nn::BatchNorm1d(nn::BatchNorm1dOptions(5).momentum(0.3)));
    };
    // The modules' statistics have to be converted before the model is wrapped.
    std::vector<std::unique_ptr<replicate::SyncBatchNorm>> synced;
    Twins<nn::Sequential> twins(
        cells,
        [&] {
          nn::Sequential model = make();
          synced.push_back(std::make_unique<replicate::SyncBatchNorm>(*model, *cells.group()));
          return model;
        },
        {.units = units_of_size(1), .max_live_units = 1});
    twins.train([](nn::Sequential& model, const at::Tensor& input) {
      return model->forward(input).pow(2).mean();
    });
    const auto expected = twins.twin()->named_buffers();
    for (const auto& buffer : twins.model()->named_buffers())
      cells.expect_same(buffer.value(), expected[buffer.key()], buffer.key());
    const at::Tensor mean = expected["1.running_mean"];
    cells.expect(mean.abs().sum().item<double>() > 0, "no statistics were taken");
  });
}

}  // namespace

void check_any_module(Cells& cells) {
  check_uses(cells);
  check_shapes(cells);
}

}  // namespace lockstep::shard

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

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

at::Tensor input_of(const Cells& cells, int step, std::int64_t width = 5) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + cells.rank()));
  return at::randn({3, width});
}

// Trains a model that is sharded beside one that is replicated, which must agree to the bit. `loss`
// is one pass over this rank's input; `between` comes after each step, for both.
template <typename Model>
class Twins {
 public:
  using Make = std::function<Model()>;
  using Loss = std::function<at::Tensor(Model&, const at::Tensor& input)>;
  using Between = std::function<at::Tensor(Model&, int step)>;

  Twins(Cells& cells, Make make, Options options = {})
      : cells_(cells),
        model_(seeded(make)),
        twin_(seeded(make)),
        sharded_(*model_, shard_over(cells.group()), scrubbed(std::move(options))),
        replicated_(*twin_, cells.group()),
        optimizer_(adamw(sharded_, *model_)),
        twin_optimizer_(optim::make_optimizer(
            optim::AdamWOptions{},
            optim::decay_groups(data_parallel::trained_parameters(*twin_), 0.1))) {}

  Model& model() { return model_; }
  Model& twin() { return twin_; }
  FullyShardedDataParallel& parallel() { return sharded_; }

  void train(const Loss& loss, const Between& between = {}) {
    for (int step = 0; step < 4; ++step) {
      const at::Tensor input = input_of(cells_, step);
      optimizer_->zero_grad();
      twin_optimizer_->zero_grad();
      const at::Tensor got = loss(model_, input);
      const at::Tensor wanted = loss(twin_, input);
      cells_.expect_same(got.detach(), wanted.detach(), fmt::format("step {}: the loss", step));
      got.backward();
      wanted.backward();
      for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin_))
        cells_.expect_same(sharded_.full_gradient(name), parameter.grad(),
                           fmt::format("step {}: the gradient of {}", step, name));
      optimizer_->step(0.05);
      twin_optimizer_->step(0.05);
      if (between)
        cells_.expect_same(between(model_, step), between(twin_, step),
                           fmt::format("step {}: what came between", step));
    }
    const auto expected = twin_->named_parameters();
    for (const auto& [name, tensor] : sharded_.full_state_dict({.rank0_only = false}))
      if (expected.contains(name)) cells_.expect_same(tensor, expected[name], name);
  }

 private:
  static Model seeded(const Make& make) {
    torch::manual_seed(11);
    return make();
  }

  Cells& cells_;
  Model model_;
  Model twin_;
  FullyShardedDataParallel sharded_;
  replicate::DistributedDataParallel replicated_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::Optimizer> twin_optimizer_;
};

const Options kOneAtATime = {.max_live_units = 1};

Chain two_layers() { return Chain(2); }
Chain three_layers() { return Chain(3); }

at::Tensor forward_loss(Chain& model, const at::Tensor& input) {
  return model->forward(input).pow(2).mean();
}

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

// The layer's output, computed a second time in backward, by a backward inside of it.
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

// Several inputs and outputs, parameters of its own, containers inside of containers.
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
    // As the sharded one's is: products of other strides may have other bits.
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
    // Their own statistics need the conversion before the wrapping.
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

void check_between(Cells& cells) {
  cells.cell("evaluation between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [&](Chain& model, int step) {
      const c10::NoGradGuard no_grad;
      return model->forward(input_of(cells, 50 + step));
    });
  });
  cells.cell("evaluation in inference mode between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [&](Chain& model, int step) {
      at::Tensor result;
      {
        const c10::InferenceMode inference;
        result =
            model->forward(input_of(cells, 50 + step)) + model->layer(0).weight.t().select(0, 1);
      }
      return result.clone();
    });
  });
  cells.cell("evaluation between forward and backward", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime)
        .train([&](Chain& model, const at::Tensor& input) {
          const at::Tensor loss = forward_loss(model, input);
          const c10::NoGradGuard no_grad;
          model->forward(input * 3);
          return loss;
        });
  });
  cells.cell("edits in place between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [](Chain& model, int step) {
      const c10::NoGradGuard no_grad;
      model->layer(0).weight.mul_(1.5);
      model->layer(1).weight[2].fill_(0.25 * step);
      model->layer(1).bias.copy_(model->layer(0).bias);
      model->layer(2).weight.t().slice(0, 1, 3).add_(1);
      model->layer(2).bias.data().sub_(0.5);
      at::clamp_out(model->layer(0).bias, model->layer(0).bias, -0.1, 0.1);
      return model->layer(0).weight.sum() + model->layer(2).weight.sum();
    });
  });
  cells.cell("weights drawn anew after wrapping", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [](Chain& model, int step) {
      torch::manual_seed(static_cast<std::uint64_t>(step));
      for (std::size_t layer = 0; layer < 3; ++layer)
        nn::init::xavier_uniform_(model->layer(layer).weight);
      return model->layer(1).weight.detach().clone();
    });
  });
  cells.cell("edits through pointers", [&] {
    Twins<Chain> twins(cells, three_layers, kOneAtATime);
    twins.train(forward_loss, [&](Chain& model, int step) {
      std::unique_ptr<ParameterGatherer::Hold> hold;
      if (&model == &twins.model()) hold = twins.parallel().full_parameters();
      double sum = 0;
      for (at::Tensor& parameter : model->parameters()) {
        auto* const values = static_cast<float*>(parameter.data_ptr());
        values[parameter.numel() - 1] = 0.1f * static_cast<float>(step);
        for (std::int64_t at = 0; at < parameter.numel(); ++at) sum += values[at];
      }
      if (hold) hold->keep_edits();
      return at::tensor(sum, at::kDouble);
    });
  });
  cells.cell("a deep copy of what a parameter is", [&] {
    Twins<Chain> twins(cells, three_layers, kOneAtATime);
    std::vector<at::Tensor> average;  // of weights, as people keep one
    for (const at::Tensor& parameter : twins.model()->parameters())
      average.push_back(parameter.detach().clone());
    twins.train(forward_loss);
    const auto twin = twins.twin()->parameters();
    std::size_t index = 0;
    for (const at::Tensor& parameter : twins.model()->parameters()) {
      const c10::NoGradGuard no_grad;
      const at::Tensor now = parameter.detach().clone();
      cells.expect_same(now, twin[index], "a clone");
      cells.expect(average[index].isfinite().all().item<bool>(), "an old clone is gone");
      cells.expect(!at::equal(average[index], now), "an old clone follows the parameter");
      ++index;
    }
  });
}

void check_autograd(Cells& cells) {
  cells.cell("torch::autograd::grad() is this rank's own", [&] {
    torch::manual_seed(2);
    Chain alone(3);
    torch::manual_seed(2);
    Chain model(3);
    const FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const auto gradients = [&](Chain& net) {
      const at::Tensor input = input_of(cells, 1).requires_grad_();
      return torch::autograd::grad({forward_loss(net, input)},
                                   {net->layer(0).weight, net->layer(2).bias, input});
    };
    for (int round = 0; round < 2; ++round) {
      const auto got = gradients(model);
      const auto wanted = gradients(alone);
      for (std::size_t index = 0; index < wanted.size(); ++index)
        cells.expect_same(got[index], wanted[index], fmt::format("gradient {}", index));
      cells.expect(!model->layer(0).weight.grad().defined(), "a gradient was kept");
    }
  });
  cells.cell("a penalty on the gradient of the input", [&] {
    torch::manual_seed(2);
    Chain alone(2);
    torch::manual_seed(2);
    Chain model(2);
    const FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const auto penalty = [&](Chain& net) {
      const at::Tensor input = input_of(cells, 1).requires_grad_();
      return torch::autograd::grad({forward_loss(net, input)}, {input}, {},
                                   /*retain_graph=*/true, /*create_graph=*/true)[0]
          .pow(2)
          .sum();
    };
    const at::Tensor wanted = torch::autograd::grad({penalty(alone)}, {alone->layer(0).weight})[0];
    cells.expect_same(torch::autograd::grad({penalty(model)}, {model->layer(0).weight})[0], wanted,
                      "the gradient of a gradient");
  });
  cells.cell("a backward that comes after the step", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(3);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      const auto optimizer = adamw(parallel, *model);
      forward_loss(model, input_of(cells, 0)).backward();
      const at::Tensor late = forward_loss(model, input_of(cells, 1));
      optimizer->step(0.1);
      try {
        late.backward();
        cells.expect(false, "backward used weights of two steps");
      } catch (const c10::Error& error) {
        cells.expect(
            std::string(error.what()).find("modified by an inplace operation") != std::string::npos,
            fmt::format("it says {}", error.what_without_backtrace()));
      }
    }
  });
  cells.cell("the same graph twice", [&] {
    torch::manual_seed(2);
    Chain alone(3);
    torch::manual_seed(2);
    Chain model(3);
    FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const at::Tensor input = at::ones({2, 5});
    const at::Tensor loss = forward_loss(model, input);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    const at::Tensor wanted = forward_loss(alone, input) * 2;
    wanted.backward();
    for (const auto& item : alone->named_parameters())
      cells.expect_close(parallel.full_gradient(item.key()), item.value().grad(), item.key());
  });
}

}  // namespace

void check_any_module(Cells& cells) {
  check_uses(cells);
  check_shapes(cells);
  check_between(cells);
  check_autograd(cells);
}

}  // namespace lockstep::shard

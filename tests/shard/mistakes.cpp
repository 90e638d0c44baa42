#include <sstream>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

at::Tensor mean_of(Chain& model) { return model->forward(at::ones({2, 5})).mean(); }
at::Tensor sum_of(Chain& model) { return model->forward(at::ones({2, 5})).sum(); }

// After the error the model still trains: the mistake left nothing half done.
void expect_trains(Cells& cells, FullyShardedDataParallel& parallel, Chain& model) {
  const auto optimizer = adamw(parallel, *model);
  optimizer->zero_grad();
  mean_of(model).backward();
  optimizer->step(0.01);
  cells.expect(std::isfinite(mean_of(model).item<double>()), "it does not train any more");
}

void check_wrapping(Cells& cells) {
  const auto wrap = [&](nn::Module& module, Options options = {}) {
    return [&cells, &module, options] { const auto it = sharded(cells, module, options); };
  };
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
    const std::string kind = cut == Cut::gradients ? "SHARD_GRAD_OP: " : "FULL_SHARD: ";
    cells.cell(kind + "wrapping twice", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      cells.expect_usage_error(wrap(*model), "is sharded already");
      cells.expect_usage_error(wrap(*model, {.cut = Cut::gradients}), "is sharded already");
      expect_trains(cells, parallel, model);
    });
    cells.cell(kind + "wrapping what a wrapped model is a part of", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      nn::Module larger("larger");
      larger.register_module("first", nn::Linear(2, 2));
      larger.register_module("chain", model);
      cells.expect_usage_error(wrap(larger), "is sharded already");
      expect_trains(cells, parallel, model);
    });
    cells.cell(kind + "wrapping a part of a wrapped model", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      // The error comes at once, or else before the larger model trains on.
      cells.expect_usage_error(
          [&] {
            const auto part = sharded(cells, *model->layers[1]);
            parallel.backward(sum_of(model), 2);
          },
          "wrap_model()");
    });
    cells.cell(kind + "ZeRO-1 of a model that is sharded", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      cells.expect_usage_error([&] { OptimizerShards(*model, cells.group()); },
                               "is sharded already");
      expect_trains(cells, parallel, model);
    });
  }
  cells.cell("a type that ranks do not send each other", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(2);
      model->layers[1]->register_parameter("phase", at::ones({3}, at::kComplexFloat));
      cells.expect_usage_error(wrap(*model, {.cut = cut}), "'layers.1.phase' of the model");
      cells.expect_usage_error([&] { replicate::DistributedDataParallel(*model, cells.group()); },
                               "view_as_real()");
    }
  });
  cells.cell("no unit at all may be there", [&] {
    Chain model(2);
    cells.expect_usage_error(wrap(*model, {.max_live_units = 0}), "max_live_units is 0");
  });
  cells.cell("a unit that the model has not", [&] {
    Chain model(2);
    cells.expect_usage_error(wrap(*model, {.units = units_named({"layers.2"})}), "'layers.2'");
    FullyShardedDataParallel parallel = sharded(cells, *model);
    expect_trains(cells, parallel, model);
  });
  cells.cell("nothing to train", [&] {
    Chain frozen(2);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    cells.expect_usage_error(wrap(*frozen), "nothing to train");
    nn::Module empty("empty");
    cells.expect_usage_error(wrap(empty), "nothing to train");
  });
  cells.cell("models that differ between ranks", [&] {
    Chain longer(cells.rank() == 1 ? 3 : 2);
    cells.expect_usage_error(wrap(*longer), "the model of rank 1 differs from that of rank 0");
    Chain wider(2, cells.rank() == 1 ? 4 : 5);
    cells.expect_usage_error(wrap(*wider), "the model of rank 1 differs from that of rank 0");
    Chain frozen(2);
    if (cells.rank() == 1) frozen->layer(0).bias.requires_grad_(false);
    cells.expect_usage_error(wrap(*frozen), "not trained");
    Chain none(2);
    if (cells.rank() == 1)
      for (at::Tensor& parameter : none->parameters()) parameter.requires_grad_(false);
    cells.expect_usage_error(wrap(*none), "rank 1");
    nn::Sequential empty;
    if (cells.rank() != 1) empty->push_back(nn::Linear(2, 2));
    cells.expect_usage_error(wrap(*empty), "rank");
  });
}

void check_optimizers(Cells& cells) {
  cells.cell("torch::optim over the model's parameters", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      torch::optim::SGD sgd(model->parameters(), 0.1);
      torch::optim::AdamW adam(model->parameters());
      mean_of(model).backward();
      cells.expect_usage_error([&] { sgd.step(); }, "make_optimizer()");
      cells.expect_usage_error([&] { adam.step(); }, "make_optimizer()");
      sgd.zero_grad();  // zero or undefined, depending on LibTorch's version
      const at::Tensor zeroed = parallel.full_gradient("layers.0.weight");
      cells.expect(!zeroed.defined() || zeroed.abs().sum().item<double>() == 0, "not zeroed");
      expect_trains(cells, parallel, model);
    }
  });
  cells.cell("optim::make_optimizer over the model's parameters", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      cells.expect_usage_error(
          [&] {
            const auto optimizer = optim::make_optimizer(
                optim::AdamWOptions{}, {{.parameters = data_parallel::trained_parameters(*model)}});
            mean_of(model).backward();
            optimizer->step(0.1);
          },
          "make_optimizer()");
      expect_trains(cells, parallel, model);
    }
  });
  cells.cell("make_optimizer over what is not the model's", [&] {
    Chain model(2);
    Chain other(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    const auto make = [&](std::vector<optim::NamedParameter> parameters) {
      return [&parallel, parameters] {
        parallel.make_optimizer(optim::AdamWOptions{}, {{.parameters = parameters}});
      };
    };
    cells.expect_usage_error(make(data_parallel::trained_parameters(*other)),
                             "'layers.0.weight' is no parameter of");
    cells.expect_usage_error(make({{"mine", at::zeros({3}).requires_grad_()}}),
                             "'mine' is no parameter of");
    cells.expect_usage_error(make({{"none", at::Tensor()}}), "'none'");
    auto twice = data_parallel::trained_parameters(*model);
    twice.push_back(twice.front());
    cells.expect_usage_error(make(twice), "layers.0.weight");
    expect_trains(cells, parallel, model);
  });
  cells.cell("torch's clipping", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      mean_of(model).backward();
      cells.expect_usage_error([&] { nn::utils::clip_grad_norm_(model->parameters(), 1.0); },
                               "clip_gradients()");
      cells.expect_usage_error(
          [&] { optim::clip_gradients(data_parallel::trained_parameters(*model), 1.0); },
          "clip_gradients()");
      cells.expect_usage_error([&] { model->layer(0).weight.grad().sum(); }, "full_gradient()");
      cells.expect_usage_error([&] { model->layer(0).weight.grad().fill_(0); },
                               "'layers.0.weight'");
      cells.expect_usage_error([&] { parallel.clip_gradients(-1); }, "-1");
      expect_trains(cells, parallel, model);
    }
  });
  cells.cell("a step after nothing but no_sync", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    const auto optimizer = adamw(parallel, *model);
    {
      const auto guard = parallel.no_sync();
      mean_of(model).backward();
    }
    cells.expect_usage_error([&] { optimizer->step(0.1); }, "no_sync()");
    cells.expect_usage_error([&] { parallel.clip_gradients(1); }, "no_sync()");
    cells.expect_usage_error([&] { parallel.full_gradient("layers.0.weight"); }, "no_sync()");
    mean_of(model).backward();
    optimizer->step(0.1);
    // Gradients of an earlier pass are beside those of a pass without an exchange.
    {
      const auto guard = parallel.no_sync();
      mean_of(model).backward();
    }
    cells.expect_usage_error([&] { optimizer->step(0.1); }, "no_sync()");
    expect_trains(cells, parallel, model);
  });
  cells.cell("a gradient of no parameter", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    cells.expect_usage_error([&] { parallel.full_gradient("layers.5.weight"); },
                             "no parameter 'layers.5.weight'");
  });
}

// A reader that goes past operators gets LibTorch's own error, which says how to read the values.
void expect_advice(Cells& cells, const std::function<void()>& body, const std::string& what) {
  try {
    body();
    cells.expect(false, what + ": no error");
  } catch (const std::exception& error) {
    cells.expect(std::string(error.what()).find("full_parameters()") != std::string::npos,
                 what + ": " + error.what());
  }
}

void expect_saved(Cells& cells, const std::vector<at::Tensor>& tensors,
                  const std::vector<NamedTensor>& wanted) {
  std::stringstream stream;
  torch::save(tensors, stream);
  std::vector<at::Tensor> loaded;
  torch::load(loaded, stream);
  cells.expect(loaded.size() == wanted.size(), "the number of tensors in the file");
  for (std::size_t i = 0; i < loaded.size() && i < wanted.size(); ++i)
    cells.expect_same(loaded[i].detach(), wanted[i].tensor, wanted[i].name);
}

// pickle_save() asks nobody. LibTorch 1 refuses memory that has a size and is not there; what
// LibTorch 2 makes of it holds no value.
void expect_pickled(Cells& cells, const at::Tensor& tensor, bool there) {
  std::vector<char> written;
  try {
    written = torch::pickle_save(c10::IValue(tensor));
  } catch (const c10::Error&) {
    cells.expect(!there && TORCH_VERSION_MAJOR < 2, "pickle_save() fails");
    return;
  }
  cells.expect(there || TORCH_VERSION_MAJOR >= 2, "pickle_save() of what is not there");
  if (there)
    cells.expect_same(torch::pickle_load(written).toTensor().detach(), tensor.detach(), "pickled");
}

void check_saved_tensors(Cells& cells) {
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
    const auto whole = parallel.full_state_dict({.rank0_only = false});
    mean_of(model).backward();
    const at::Tensor parameter = model->layer(0).weight;
    std::stringstream stream;
    cells.expect_usage_error([&] { torch::save(parameter.grad(), stream); }, "full_gradient()");
    if (cut == Cut::gradients) {
      expect_saved(cells, model->parameters(), whole);
      continue;
    }
    // This comes before any operator brings the unit, which then stays for a while.
    expect_advice(
        cells, [&] { parameter.data_ptr<float>(); }, "data_ptr");
    expect_pickled(cells, parameter, /*there=*/false);
    expect_pickled(cells, parameter.grad(), /*there=*/false);
    cells.expect_usage_error([&] { torch::save(model->parameters(), stream); },
                             "full_state_dict()");
    cells.expect_usage_error([&] { torch::save(parameter, stream); }, "full_parameters()");
    cells.expect_usage_error([&] { torch::save(parameter.detach(), stream); }, "'layers.0'");
    cells.expect_usage_error(
        [&] {
          torch::serialize::OutputArchive inner, archive;
          inner.write("values", c10::IValue(std::vector<at::Tensor>{at::ones({1}), parameter}));
          archive.write("inner", inner);
          archive.save_to(stream);
        },
        "full_state_dict()");
    {
      const auto held = parallel.full_parameters();
      expect_saved(cells, model->parameters(), whole);
      expect_pickled(cells, parameter, /*there=*/true);
    }
    expect_trains(cells, parallel, model);
  }
}

void check_changes(Cells& cells) {
  cells.cell("to(), set_data() and the like after wrapping", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters})
      for (const auto& change : std::vector<std::function<void(Chain&)>>{
               [](Chain& model) { model->to(at::kDouble); },
               [](Chain& model) {
                 model->layer(0).weight.set_data(at::zeros({5, 5}));
               },
               [](Chain& model) {
                 const c10::NoGradGuard no_grad;
                 model->layer(0).weight.set_(at::zeros({5, 5}));
               }}) {
        Chain model(2);
        FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
        const auto optimizer = adamw(parallel, *model);
        mean_of(model).backward();
        // The error comes at once, or else before the model trains on.
        cells.expect_usage_error(
            [&] {
              change(model);
              optimizer->step(0.1);
            },
            "wrap_model()");
      }
  });
  cells.cell("to(meta) after wrapping, which LibTorch itself may refuse", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    try {
      model->to(at::Device(at::kMeta));
      cells.expect(false, "the weights are gone");
    } catch (const std::exception&) {
    }
    expect_trains(cells, parallel, model);
  });
  cells.cell("torch::save and torch::load", [&] {
    Chain model(2);
    std::stringstream plain;
    torch::save(model, plain);
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain wrapped(2);
      FullyShardedDataParallel parallel = sharded(cells, *wrapped, {.cut = cut});
      std::stringstream stream;
      cells.expect_usage_error([&] { torch::save(wrapped, stream); }, "full_state_dict()");
      expect_trains(cells, parallel, wrapped);
      plain.clear();
      plain.seekg(0);
      cells.expect_usage_error([&] { torch::load(wrapped, plain); }, "load_full_state_dict()");
    }
  });
  cells.cell("torch::save of tensors that are cut", [&] { check_saved_tensors(cells); });
  cells.cell("what was frozen and is trained later", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(2);
      for (at::Tensor& parameter : model->layers[0]->parameters()) parameter.requires_grad_(false);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      for (at::Tensor& parameter : model->layers[0]->parameters()) parameter.requires_grad_(true);
      cells.expect_usage_error([&] { mean_of(model).backward(); }, "'layers.0.weight' was frozen");
    }
  });
  cells.cell("what is frozen later stays as it is", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    const auto optimizer = adamw(parallel, *model);
    for (at::Tensor& parameter : model->layers[0]->parameters()) parameter.requires_grad_(false);
    const auto before = parallel.full_state_dict({.rank0_only = false});
    mean_of(model).backward();
    optimizer->step(0.1);
    const auto after = parallel.full_state_dict({.rank0_only = false});
    cells.expect_same(after[0].tensor, before[0].tensor, "the frozen weight");
    cells.expect(!at::equal(after[2].tensor, before[2].tensor), "the trained weight stays");
  });
  cells.cell("a model whose FullyShardedDataParallel is gone", [&] {
    Chain model(2);
    at::Tensor loss;
    {
      const FullyShardedDataParallel parallel = sharded(cells, *model);
      loss = mean_of(model);
    }
    cells.expect_usage_error([&] { mean_of(model); }, "gone");
    cells.expect_usage_error([&] { loss.backward(); }, "gone");
    cells.expect_usage_error([&] { sharded(cells, *model); }, "by a manager that is gone");
  });
  cells.cell("one of SHARD_GRAD_OP is whole, and is not trained on each rank by itself", [&] {
    Chain model(2);
    { const FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = Cut::gradients}); }
    const at::Tensor loss = mean_of(model);
    cells.expect(loss.isfinite().item<bool>(), "the loss");
    cells.expect_usage_error([&] { loss.backward(); }, "by a manager that is gone");
  });
}

void check_passes(Cells& cells) {
  cells.cell("no loss where parameters are sharded", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    cells.expect_usage_error([&] { parallel.backward({}, 0); }, "loss times 0");
    cells.expect_usage_error([&] { parallel.backward({}, 3); }, "without a loss");
    cells.expect_usage_error(
        [&] {
          parallel.backward(model->forward(at::ones({2, 5})), 2);
        },
        "of shape [2, 5]");
    cells.expect_usage_error([&] { parallel.backward(sum_of(model), -1); }, "-1");
    expect_trains(cells, parallel, model);
  });
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
    const std::string kind = cut == Cut::gradients ? "SHARD_GRAD_OP: " : "FULL_SHARD: ";
    cells.cell(kind + "counted and plain passes in one step", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      mean_of(model).backward();
      cells.expect_usage_error([&] { parallel.backward(sum_of(model), 2); }, "do not add up");
      model->zero_grad();
      {
        const auto guard = parallel.no_sync();
        parallel.backward(sum_of(model), 2);
      }
      cells.expect_usage_error([&] { mean_of(model).backward(); }, "do not add up");
    });
    cells.cell(kind + "counted steps without zeroing", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      parallel.backward(sum_of(model), 2);
      cells.expect_usage_error([&] { parallel.backward(sum_of(model), 2); }, "call zero_grad()");
      expect_trains(cells, parallel, model);
    });
    cells.cell(kind + "plain passes on top of a counted one", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      parallel.backward(sum_of(model), 2);
      cells.expect_usage_error([&] { mean_of(model).backward(); }, "do not add up");
    });
    cells.cell(kind + "gradients that are part of a graph", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      cells.expect_usage_error(
          [&] { mean_of(model).backward({}, c10::nullopt, /*create_graph=*/true); },
          "create_graph");
    });
    cells.cell(kind + "sparse gradients", [&] {
      nn::Embedding model(nn::EmbeddingOptions(5, 3).sparse(true));
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      cells.expect_usage_error([&] { model->forward(at::arange(2)).sum().backward(); },
                               "the gradient of 'weight' is sparse");
    });
    cells.cell(kind + "a pass that ended in an exception", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      const at::Tensor hidden = model->layer(0).forward(at::ones({2, 5}));
      hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("no memory"); });
      try {
        parallel.backward(model->layer(1).forward(hidden).sum(), 2);
        cells.expect(false, "the exception");
      } catch (const UsageError&) {
        cells.expect(false, "an exception of the user's became another");
      } catch (const std::exception&) {
      }
      cells.expect_usage_error([&] { parallel.backward(sum_of(model), 2); },
                               "ended in an exception");
    });
  }
}

}  // namespace

void check_mistakes(Cells& cells) {
  check_wrapping(cells);
  check_optimizers(cells);
  check_changes(cells);
  check_passes(cells);
}

}  // namespace lockstep::shard

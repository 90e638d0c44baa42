#include "every_strategy.h"

#include <sstream>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <lockstep/distributed/distributed.h>

#include "same_state.h"

namespace lockstep {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

constexpr std::int64_t kWidth = 24;

// All weights have one shape, so a mix-up of two is not noticed by the shape; the head is
// registered first and used last.
struct EqualLayersImpl : nn::Module {
  nn::Linear head{nullptr};
  nn::ModuleList layers{nullptr};
  EqualLayersImpl() {
    head = register_module("head", nn::Linear(kWidth, kWidth));
    layers = register_module("layers", nn::ModuleList());
    for (int i = 0; i < 3; ++i) layers->push_back(nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = at::tanh(layer->as<nn::Linear>()->forward(x));
    return head(x);
  }
};
TORCH_MODULE(EqualLayers);

DistributedManager setup(ShardingStrategy strategy) {
  return setup_distributed({.mode = ParallelMode::FSDP,
                            .sharding_strategy = strategy,
                            .timeout = milliseconds(30'000),
                            .device_type = c10::DeviceType::CPU});
}

template <typename Model>
Model seeded(std::uint64_t seed = 3) {
  torch::manual_seed(seed);
  return Model();
}

template <typename Model>
void backward(DistributedManager& dist, Model& model, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(10 * step + dist.rank()));
  model->forward(at::randn({5, kWidth})).pow(2).mean().backward();
}

template <typename Model>
void train(DistributedManager& dist, Model& model, optim::Optimizer& optimizer, int first,
           int steps) {
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    backward(dist, model, step);
    optimizer.step(0.01);
  }
}

// The weights on every rank, not only the ones that the first rank returns.
template <typename Model>
std::vector<NamedTensor> own_weights(DistributedManager& dist, Model& model) {
  const auto hold = dist.full_parameters(model);
  std::vector<NamedTensor> result;
  for (const auto& item : model->named_parameters())
    result.push_back({item.key(), item.value().detach().clone()});
  return result;
}

void check_state_between(Cells& cells, ShardingStrategy from, ShardingStrategy to) {
  cells.cell(fmt::format("state goes from strategy {} to {}", int(from), int(to)), [&] {
    std::vector<NamedTensor> model_state, optimizer_state, expected;
    {
      DistributedManager dist = setup(from);
      EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
      const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
      train(dist, model, *optimizer, 0, 2);
      model_state = dist.full_state_dict(model);
      optimizer_state = dist.full_optimizer_state(model, *optimizer);
      // A returned state does not change with the model.
      train(dist, model, *optimizer, 2, 2);
      expected = own_weights(dist, model);
    }
    DistributedManager dist = setup(to);
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>(99));
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
    dist.load_full_state_dict(model, model_state);
    dist.load_full_optimizer_state(model, *optimizer, optimizer_state);
    train(dist, model, *optimizer, 2, 2);
    expect_same_state(cells, own_weights(dist, model), expected);
  });
}

// Every rank refuses it, although only the first rank's list counts.
void check_other_state(Cells& cells, DistributedManager& dist) {
  cells.cell("state of another model", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
    const auto given = dist.full_state_dict(model, kEveryRank);
    const auto refused = [&](std::vector<NamedTensor> state, const std::string& part) {
      cells.expect_usage_error([&] { dist.load_full_state_dict(model, state); }, part);
    };
    auto missing = given;
    missing.erase(missing.begin());
    refused(missing, "'" + given.front().name + "' is missing");
    auto more = given;
    more.push_back({"tail", at::zeros({3})});
    refused(more, "'tail'");
    auto narrow = given;
    narrow.front().tensor = at::zeros({1});
    refused(narrow, "shape [1]");
    auto optimizer_state = dist.full_optimizer_state(model, *optimizer, kEveryRank);
    optimizer_state.pop_back();
    cells.expect_usage_error(
        [&] { dist.load_full_optimizer_state(model, *optimizer, optimizer_state); }, "state");
    // Nothing has changed.
    expect_same_state(cells, dist.full_state_dict(model, kEveryRank), given);
  });
}

// Each optimizer steps on its own parameters and zeroes its own gradients.
std::vector<NamedTensor> trained_by_two(DistributedManager& dist) {
  EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
  std::vector<optim::NamedParameter> first, second;
  for (const auto& item : model->named_parameters())
    (item.key().starts_with("head") ? first : second)
        // These names are the caller's own.
        .push_back({"my." + item.key(), item.value()});
  const auto one = dist.make_optimizer(model, optim::AdamWOptions{}, {{.parameters = first}});
  const auto two = dist.make_optimizer(model, optim::SGDOptions{}, {{.parameters = second}});
  for (int step = 0; step < 3; ++step) {
    backward(dist, model, step);
    one->step(0.01);
    one->zero_grad();
    two->step(0.05);
    two->zero_grad();
  }
  const auto state = dist.full_optimizer_state(model, *one, kEveryRank);
  std::vector<NamedTensor> result = own_weights(dist, model);
  for (const NamedTensor& tensor : state) result.push_back({tensor.name, tensor.tensor.clone()});
  return result;
}

// A parameter has two names, one of them a buffer's, and is read through children().
struct TwiceNamed : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(kWidth, kWidth));
  nn::Linear second = register_module("second", nn::Linear(kWidth, kWidth));
  at::Tensor shared, again, noted;
  TwiceNamed() {
    shared = register_parameter("shared", at::ones({kWidth}));
    again = register_parameter("again", shared);
    noted = register_buffer("noted", shared);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& child : children()) x = at::tanh(child->as<nn::Linear>()->forward(x));
    return x * shared + again;
  }
};

void check_names(Cells& cells, DistributedManager& dist) {
  cells.cell("one tensor under several names", [&] {
    auto model = dist.wrap_model(std::make_shared<TwiceNamed>());
    backward(dist, model, 0);
    cells.expect_same(dist.full_gradient(model, "again"), dist.full_gradient(model, "shared"),
                      "the gradient by its other name");
    cells.expect(dist.full_gradient(model, "again").defined(), "there is no gradient");
    const auto state = dist.full_state_dict(model, kEveryRank);
    cells.expect(state.size() == 7, fmt::format("{} names in the state", state.size()));
    dist.load_full_state_dict(model, state);
  });
}

void check_memory(Cells& cells, DistributedManager& dist, ShardingStrategy strategy) {
  cells.cell("memory that an optimizer takes is counted while it is there", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto report = [&] { return dist.memory_report(model); };
    cells.expect(report().optimizer == 0, "before there is one");
    {
      const auto one = dist.make_optimizer(model, optim::AdamWOptions{});
      const auto other = dist.make_optimizer(model, optim::AdamWOptions{});
    }
    cells.expect(report().optimizer == 0, "after they are gone");
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
    const double whole = 8.0 * static_cast<double>(report().num_parameters);
    const double wanted =
        strategy == ShardingStrategy::NO_SHARD ? whole : whole / cells.num_ranks();
    cells.expect(std::abs(static_cast<double>(report().optimizer) / wanted - 1) < 0.05,
                 fmt::format("{} bytes of an optimizer's state", report().optimizer));
  });
}

void check_pointers(Cells& cells, DistributedManager& dist) {
  cells.cell("what is written through pointers lasts", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    {
      const auto whole = dist.full_parameters(model);
      model->head->weight.data_ptr<float>()[5] = 42;
      model->head->weight.data_ptr<float>()[kWidth * kWidth - 1] = 43;
    }
    const at::Tensor weight = model->head->weight.detach().reshape({-1}).clone();
    cells.expect(weight[5].item<float>() == 42, "at the begin");
    cells.expect(weight[kWidth * kWidth - 1].item<float>() == 43, "at the end");
  });
}

// Models of which each rank would otherwise train its own, or nothing.
void check_refused(Cells& cells, DistributedManager& dist, bool moves_memory) {
  cells.cell("a part of a model that is wrapped", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    cells.expect_usage_error([&] { dist.wrap_model(model->head); },
                             "belongs to a model that is wrapped already");
    cells.expect_usage_error([&] { dist.convert_sync_batchnorm(model->head); },
                             "convert_sync_batchnorm() before wrap_model()");
    DistributedManager other = setup(ShardingStrategy::NO_SHARD);
    cells.expect_usage_error([&] { other.wrap_model(model); },
                             "belongs to a model that is wrapped already");
    backward(dist, model, 0);
  });
  cells.cell("parameters that come later", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    model->register_parameter("late", at::ones({3}));
    cells.expect_usage_error([&] { dist.clip_gradients(model, 1.0); }, "'late' was registered");
    EqualLayers other = dist.wrap_model(seeded<EqualLayers>());
    other->replace_module("head", nn::Linear(kWidth, kWidth));
    cells.expect_usage_error([&] { dist.full_state_dict(other); }, "'head.weight' was registered");
  });
  cells.cell("what comes later, in a plain backward pass", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    for (const at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
    const at::Tensor late = model->register_parameter("late", at::ones({3}));
    cells.expect_usage_error([&] { late.sum().backward(); }, "'late' was registered");
  });
  cells.cell("a step after passes that exchanged nothing", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
    train(dist, model, *optimizer, 0, 1);
    optimizer->zero_grad();
    const std::string alone = "is this rank's alone";
    {
      const auto local = dist.no_sync(model);
      backward(dist, model, 1);
      cells.expect_usage_error([&] { optimizer->step(0.1); }, alone);
      cells.expect_usage_error([&] { dist.clip_gradients(model, 1); }, alone);
      cells.expect_usage_error([&] { dist.full_gradient(model, "head.weight"); }, alone);
    }
    backward(dist, model, 1);
    optimizer->step(0.01);
  });
  cells.cell("other users of a parameter's memory", [&] {
    const auto accepted = [&](EqualLayers model, const std::string& part) {
      if (moves_memory)
        cells.expect_usage_error([&] { dist.wrap_model(model); }, part);
      else
        dist.wrap_model(model);
    };
    EqualLayers viewed;
    const at::Tensor transposed = viewed->head->weight.t();
    accepted(viewed, "the memory of 'head.weight' has 1 more user");
    EqualLayers aliased;
    aliased->layers[0]->as<nn::Linear>()->weight.set_data(aliased->head->weight.data());
    accepted(aliased, "lie in the same memory");
    // Only one rank does it, but all ranks refuse it, because they would wait for each other
    // otherwise.
    EqualLayers on_one;
    const at::Tensor kept = dist.is_main() ? on_one->head->bias.detach() : at::Tensor();
    accepted(on_one, "'head.bias'");
    // Two parameters are side by side in one memory.
    EqualLayers packed;
    {
      const c10::NoGradGuard no_grad;
      const at::Tensor memory = at::randn({2, kWidth});
      packed->head->bias.set_data(memory[0]);
      packed->layers[0]->as<nn::Linear>()->bias.set_data(memory[1]);
    }
    dist.wrap_model(packed);
  });
}

// Returns a model that outlives its manager.
EqualLayers made_by_nobody(ShardingStrategy strategy) {
  return setup(strategy).wrap_model(seeded<EqualLayers>());
}

void check_without_manager(Cells& cells, ShardingStrategy strategy) {
  cells.cell("a model whose manager is gone", [&] {
    EqualLayers model = made_by_nobody(strategy);
    cells.expect_usage_error(
        [&] {
          model->forward(at::ones({1, kWidth})).sum().backward();
        },
        "by a manager that is gone");
    // The other strategies have cut the model, or put it into memory to which this pass's graph
    // still refers.
    if (strategy != ShardingStrategy::NO_SHARD) return;
    DistributedManager dist = setup(strategy);
    dist.wrap_model(model);
    model->zero_grad();
    (model->head->bias.sum() * (dist.rank() + 1)).backward();
    cells.expect_same(model->head->bias.grad(), at::full({kWidth}, 1.5f), "with another one");
  });
}

// The model is loaded after it was wrapped, with whichever optimizer it is trained.
void check_loading(Cells& cells, DistributedManager& dist, ShardingStrategy strategy) {
  cells.cell("a model that is loaded and converted after it was wrapped", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
    train(dist, model, *optimizer, 0, 1);
    std::stringstream file;
    torch::save(seeded<EqualLayers>(5), file);
    torch::load(model, file);
    EqualLayers expected = dist.wrap_model(seeded<EqualLayers>());
    const auto steps = dist.make_optimizer(expected, optim::AdamWOptions{});
    train(dist, expected, *steps, 0, 1);
    {
      const c10::NoGradGuard no_grad;
      const auto other = seeded<EqualLayers>(5)->named_parameters();
      for (const auto& item : expected->named_parameters()) item.value().copy_(other[item.key()]);
    }
    train(dist, model, *optimizer, 1, 2);
    train(dist, expected, *steps, 1, 2);
    expect_same_state(cells, own_weights(dist, model), own_weights(dist, expected));
    // The model is loaded between the pass and the step: the step changes the loaded weights.
    std::stringstream again;
    torch::save(seeded<EqualLayers>(6), again);
    torch::load(model, again);
    optimizer->step(0);
    cells.expect_same(model->head->weight, seeded<EqualLayers>(6)->head->weight, "the weight");
    // The optimizer's state has the former type.
    model->to(at::kDouble);
    if (strategy == ShardingStrategy::SHARD_OPTIMIZER)
      cells.expect_usage_error([&] { dist.make_optimizer(model, optim::AdamWOptions{}); },
                               "convert the model before wrap_model()");
    else
      cells.expect_usage_error([&] { optimizer->step(0.01); }, "Double");
  });
}

// One rank's memory changes by itself.
void check_consistency(Cells& cells, ShardingStrategy strategy) {
  cells.cell("ranks compare what they hold alike", [&] {
    const bool hybrid = strategy == ShardingStrategy::HYBRID_SHARD;
    DistributedConfig config{.mode = ParallelMode::FSDP,
                             .sharding_strategy = strategy,
                             .timeout = milliseconds(30'000),
                             .device_type = c10::DeviceType::CPU,
                             .consistency_check_interval = 2};
    if (hybrid) config.mesh = {{"dp_replicate", cells.num_ranks()}, {"dp_shard", 1}};
    DistributedManager dist = setup_distributed(config);
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto step = [&](int number) {
      model->zero_grad();
      backward(dist, model, number);
    };
    step(0);
    const auto held = dist.held_state(model);
    if (dist.rank() == 1)
      for (const mesh::HeldTensor& one : held)
        if (one.name == "layers.1.weight") {
          const c10::NoGradGuard no_grad;
          one.values.view({-1})[0] += 1;
        }
    dist.held_state_written(model);
    step(1);
    cells.expect_usage_error([&] { step(2); },
                             "1 of 8 parameters are not the same on all ranks that should hold the "
                             "same: 'layers.1.weight' has other values on rank 1 than on the "
                             "other 1");
  });
}

// With hybrid shards every copy of the model has a first rank, and one of those is the main rank.
void check_copies(Cells& cells) {
  cells.cell("state of several copies is handed to the main rank alone", [&] {
    DistributedManager dist =
        setup_distributed({.mode = ParallelMode::FSDP,
                           .sharding_strategy = ShardingStrategy::HYBRID_SHARD,
                           .mesh = {{"dp_replicate", cells.num_ranks()}, {"dp_shard", 1}},
                           .timeout = milliseconds(30'000),
                           .device_type = c10::DeviceType::CPU});
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
    cells.expect(dist.full_optimizer_state(model, *optimizer).empty() != dist.is_main(),
                 "the optimizer's state");
    cells.expect(dist.full_state_dict(model).empty() != dist.is_main(), "the model's state");
  });
}

void check_saving(Cells& cells, DistributedManager& dist) {
  cells.cell("saving a part", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    std::ostringstream stream;
    cells.expect_usage_error([&] { torch::save(model->head, stream); }, "full_state_dict");
    cells.expect_usage_error([&] { torch::save(model, stream); }, "full_state_dict");
    cells.expect(model->children().size() == 2, "a child that the model has not made");
  });
}

}  // namespace

void check_every_strategy(Cells& cells) {
  using enum ShardingStrategy;
  constexpr ShardingStrategy kAll[] = {NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD};
  for (const ShardingStrategy from : kAll)
    for (const ShardingStrategy to : kAll) check_state_between(cells, from, to);

  std::vector<NamedTensor> by_two;
  for (const ShardingStrategy strategy : kAll) {
    DistributedManager dist = setup(strategy);
    cells.cell("two optimizers", [&] {
      const auto trained = trained_by_two(dist);
      if (by_two.empty()) by_two = trained;
      expect_same_state(cells, trained, by_two);
      cells.expect(trained.back().name.find("my.") == std::string::npos,
                   "state under another name than the model's: " + trained.back().name);
    });
    check_other_state(cells, dist);
    check_names(cells, dist);
    check_memory(cells, dist, strategy);
    check_pointers(cells, dist);
    check_refused(cells, dist, strategy != NO_SHARD);
    if (strategy == SHARD_GRAD_OP || strategy == FULL_SHARD)
      check_saving(cells, dist);
    else
      check_loading(cells, dist, strategy);
    check_without_manager(cells, strategy);
  }
  for (const ShardingStrategy strategy : {NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD})
    check_consistency(cells, strategy);
  check_copies(cells);
}

}  // namespace lockstep

#include "every_strategy.h"

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
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

// Calls a function in its backward pass.
struct Within : torch::autograd::Function<Within> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            std::function<void()> call) {
    context->saved_data["call"] =
        c10::IValue::make_capsule(c10::make_intrusive<Call>(std::move(call)));
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const c10::AutoGradMode grad(true);
    static_cast<Call&>(*context->saved_data["call"].toCapsule()).function();
    return {gradients[0], at::Tensor()};
  }

 private:
  struct Call : torch::CustomClassHolder {
    explicit Call(std::function<void()> f) : function(std::move(f)) {}
    std::function<void()> function;
  };
};

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

// The program keeps the head of a model, or layers that it had put together only to wrap them.
void check_left_parts(Cells& cells, ShardingStrategy strategy) {
  // Each weight's gradient is rank + 1, whose mean is 1.5.
  const auto backward_of = [](nn::Linear& layer, int rank) {
    layer->forward(at::full({1, kWidth}, rank + 1.0f)).sum().backward();
  };
  cells.cell("a part of a model that is gone is trained over the ranks", [&] {
    nn::Linear head{nullptr};
    std::unique_ptr<optim::Optimizer> optimizer;
    {
      DistributedManager dist = setup(strategy);
      {
        EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
        optimizer = dist.make_optimizer(model, optim::SGDOptions{});
        head = model->head;
      }
      const at::Tensor before = head->weight.detach().clone();
      for (int step = 0; step < 2; ++step) {
        // Asked about another model, the manager looks for models of which nothing is left.
        cells.expect(!dist.is_wrapped(nn::Linear(2, 2)), "another model is wrapped");
        backward_of(head, dist.rank());
        optimizer->step(0.1);
        optimizer->zero_grad();
      }
      cells.expect_close(head->weight.detach().clone(), before - 0.3f, "the weight");
      head->register_parameter("late", at::ones({3}));
      cells.expect_usage_error([&] { backward_of(head, dist.rank()); },
                               "'head.late' was registered after wrap_model()");
    }
    cells.expect_usage_error([&] { backward_of(head, cells.rank()); }, "by a manager that is gone");
  });
  cells.cell("layers that were put together only to be wrapped", [&] {
    DistributedManager dist = setup(strategy);
    nn::Linear first(kWidth, kWidth), second(kWidth, kWidth);
    dist.wrap_model(nn::Sequential(first, second));
    cells.expect(!dist.is_wrapped(nn::Linear(2, 2)), "another model is wrapped");
    backward_of(second, dist.rank());
    if (strategy == ShardingStrategy::NO_SHARD) {
      cells.expect_same(second->weight.grad(), at::full({kWidth, kWidth}, 1.5f), "the gradient");
      // They may become part of another model.
      nn::Sequential next = dist.wrap_model(nn::Sequential(second));
      next->zero_grad();
      backward_of(second, dist.rank());
      cells.expect_same(second->weight.grad(), at::full({kWidth, kWidth}, 1.5f), "in another");
      cells.expect_usage_error([&] { backward_of(first, dist.rank()); }, "manager that is gone");
    } else if (strategy == ShardingStrategy::SHARD_OPTIMIZER) {
      cells.expect_same(second->weight.grad(), at::full({kWidth, kWidth}, 1.5f), "the gradient");
    } else {
      cells.expect_usage_error([&] { (void)second->weight.grad().sum(); }, "cut among the ranks");
    }
  });
}

// Other ranks would wait for it until their deadline.
void check_refused_on_one_rank(Cells& cells, ShardingStrategy strategy) {
  cells.cell("what one rank alone refuses is named on all of them", [&] {
    DistributedManager dist = setup(strategy);
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    backward(dist, model, 0);
    if (dist.rank() == 1) model->register_parameter("late", at::ones({3}));
    std::string text;
    try {
      backward(dist, model, 1);
    } catch (const Error& error) {
      text = error.what();
    }
    cells.group()->barrier().wait();  // a rank that leaves before is named for that
    cells.expect(text.find("'late' was registered after wrap_model()") != text.npos, text);
    if (dist.rank() != 1)
      cells.expect(text.find("Rank 1 does not come to this call") != text.npos, text);
  });
}

// Another model of the program trains on.
void check_refused_alone(Cells& cells, DistributedManager& dist, ShardingStrategy strategy) {
  cells.cell("a model that is refused, beside another", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    EqualLayers refused = dist.wrap_model(seeded<EqualLayers>(4));
    const at::Tensor late = refused->register_parameter("late", at::ones({3}));
    backward(dist, model, 0);
    // A pass within a pass, which is not known before it begins.
    (model->forward(at::ones({2, kWidth})).sum() +
     Within::apply(at::ones({1}).requires_grad_(), [] {
     })).backward();
    const std::string text = "'late' was registered";
    cells.expect_usage_error([&] { backward(dist, refused, 1); }, text);
    cells.expect_usage_error([&] { late.sum().backward(); }, text);
    cells.expect_usage_error(
        [&] {
          const at::Tensor loss = refused->head->forward(at::ones({1, kWidth})).sum();
          Within::apply(at::ones({1}).requires_grad_(), [loss] { loss.backward(); }).backward();
        },
        text);
    backward(dist, model, 2);
    if (strategy != ShardingStrategy::NO_SHARD) return;
    EqualLayers unfrozen = seeded<EqualLayers>(5);
    unfrozen->head->bias.requires_grad_(false);
    unfrozen = dist.wrap_model(unfrozen);
    unfrozen->head->bias.requires_grad_(true);
    backward(dist, model, 3);
    cells.expect_usage_error([&] { backward(dist, unfrozen, 4); }, "'head.bias' was frozen");
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

// While gradients wait to be summed, which is when parameters are watched.
void check_loading_between_passes(Cells& cells, DistributedManager& dist,
                                  ShardingStrategy strategy) {
  cells.cell("a model that is loaded and converted between passes under no_sync()", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto leave_gradients = [&](int pass, at::ScalarType type = at::kFloat) {
      const auto local = dist.no_sync(model);
      model->forward(at::full({2, kWidth}, pass + 1, type)).sum().backward();
    };
    leave_gradients(0);
    std::stringstream file;
    torch::save(seeded<EqualLayers>(5), file);
    torch::load(model, file);
    leave_gradients(1);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    cells.expect_usage_error([&] { optimizer.step(); }, "the gradients of 2 backward passes");
    cells.expect_same(model->head->weight, seeded<EqualLayers>(5)->head->weight, "the weight");
    backward(dist, model, 2);
    if (strategy != ShardingStrategy::NO_SHARD) return;
    optimizer.step();
    model->zero_grad();
    leave_gradients(3);
    model->zero_grad();
    model->to(at::kDouble);
    leave_gradients(4, at::kDouble);
    cells.expect_usage_error([&] { optimizer.step(); }, "the gradients of ");
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

// What lies on the ranks between passes.
void check_exchanged_passes(Cells& cells, ShardingStrategy strategy) {
  for (const ExchangeGradients when :
       {ExchangeGradients::automatic, ExchangeGradients::each_pass, ExchangeGradients::last_pass})
    cells.cell(fmt::format("passes that others follow, exchanged \"{}\"", name_of(when)), [&] {
      DistributedManager dist = setup_distributed({.mode = ParallelMode::FSDP,
                                                   .sharding_strategy = strategy,
                                                   .timeout = milliseconds(30'000),
                                                   .device_type = c10::DeviceType::CPU,
                                                   .exchange_gradients = when});
      EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
      const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
      const auto pass = [&](int number) {
        const at::Tensor input = at::full({2, kWidth}, 0.1 * number + dist.rank());
        dist.backward(model, model->forward(input).pow(2).sum(), 2);
      };
      {
        const auto more = dist.accumulate(model);
        pass(0);
        pass(1);
      }
      const bool summed = when == ExchangeGradients::automatic
                              ? strategy != ShardingStrategy::NO_SHARD &&
                                    strategy != ShardingStrategy::SHARD_OPTIMIZER
                              : when == ExchangeGradients::each_pass;
      cells.expect_usage_error([&] { optimizer->step(0.1); },
                               summed ? "a sum that is not divided yet" : "this rank's alone");
      pass(2);
      cells.expect(dist.totals(model).count() == 6.0 * dist.world_size(), "the count is wrong");
      optimizer->step(0.1);
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

using LibTorchOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <typename Optimizer, typename Options>
LibTorchOptimizer made_with(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

std::vector<std::pair<std::string, LibTorchOptimizer>> libtorch_optimizers() {
  using namespace torch::optim;
  return {{"SGD", made_with<SGD>(SGDOptions(0.1))},
          {"SGD with decay", made_with<SGD>(SGDOptions(0.1).momentum(0.9).weight_decay(0.1))},
          {"Adam", made_with<Adam>(AdamOptions())},
          {"AdamW", made_with<AdamW>(AdamWOptions())},
          {"Adagrad", made_with<Adagrad>(AdagradOptions())},
          {"RMSprop", made_with<RMSprop>(RMSpropOptions())}};
}

// Optimizers that know nothing of ranks, while gradients wait to be summed.
void check_unsummed_steps(Cells& cells, DistributedManager& dist) {
  const auto leave_gradients = [&](EqualLayers& model, int num_passes) {
    const auto local = dist.no_sync(model);
    for (int pass = 0; pass < num_passes; ++pass) backward(dist, model, pass);
  };
  for (const auto& [name, make] : libtorch_optimizers())
    cells.cell(name + " of LibTorch's on gradients that were never summed", [&] {
      EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
      const auto optimizer = make(model->parameters());
      const auto before = own_weights(dist, model);
      leave_gradients(model, 1);
      cells.expect_usage_error([&] { optimizer->step(); }, "was about to change 'head.weight'");
      leave_gradients(model, 2);
      cells.expect_usage_error([&] { optimizer->step(); }, "the gradients of 3 backward passes");
      expect_same_state(cells, own_weights(dist, model), before);
      // The waiting gradients are summed with those of the next pass.
      const auto ours = dist.make_optimizer(model, optim::AdamWOptions{});
      backward(dist, model, 3);
      ours->step(0.01);
      // Dropped, it counts no more.
      model->zero_grad();
      leave_gradients(model, 1);
      ours->zero_grad();
      leave_gradients(model, 1);
      cells.expect_usage_error([&] { optimizer->step(); }, "the gradients of 1 backward pass ");
    });
  cells.cell("other ways to step on gradients that were never summed", [&] {
    const c10::NoGradGuard no_grad;
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const at::Tensor weight = model->head->weight, bias = model->head->bias;
    const auto refused = [&](const std::string& parameter, const std::function<void()>& step) {
      cells.expect_usage_error(step, "'" + parameter + "' on this rank alone");
    };
    {
      const c10::AutoGradMode grad(true);
      leave_gradients(model, 1);
    }
    const at::Tensor gradient = weight.grad();
    refused("head.weight", [&] { weight.sub_(gradient, 0.1); });
    refused("head.weight", [&] { weight.data() -= 0.1 * gradient; });
    refused("head.weight", [&] { weight.view({-1}).narrow(0, 3, 2).mul_(2); });
    refused("head.bias", [&] { bias.detach()[3].add_(1); });
    refused("head.weight", [&] {
      at::Tensor out = weight;
      at::add_out(out, weight, gradient, -0.1);
    });
    const std::vector<at::Tensor> biases = {bias}, gradients = {bias.grad()};
    refused("head.bias", [&] { at::_foreach_add_(biases, gradients, -0.1); });
    // Operators that read a parameter, or replace its values, are allowed.
    const auto held = weight.clone();
    weight.copy_(held);
    weight.data().copy_(held);
    torch::nn::init::normal_(weight);
    torch::nn::init::xavier_uniform_(weight);
    torch::nn::init::zeros_(bias);
    torch::nn::init::eye_(weight);
    weight.clamp_(-1, 1);
    weight.copy_(held);
    gradient.mul_(0.5);
    // Nothing waits where gradients are gone, or zero as LibTorch 1 leaves them.
    for (const at::Tensor& parameter : model->parameters()) parameter.grad().zero_();
    weight.mul_(1);
    model->zero_grad();
    bias.add_(0);
  });
  for (const bool in_place : {true, false})
    cells.cell(fmt::format("steps of one's own that {} are refused once they are more than a load",
                           in_place ? "copy" : "set data"),
               [&] {
                 EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
                 const auto step = [&] {
                   leave_gradients(model, 1);
                   const c10::NoGradGuard no_grad;
                   at::Tensor weight = model->head->weight;
                   const at::Tensor next = weight - 0.1 * weight.grad();
                   in_place ? (void)weight.copy_(next) : weight.set_data(next);
                   model->zero_grad();
                 };
                 cells.expect_usage_error(
                     [&] {
                       for (int i = 0; i < 3; ++i) step();
                     },
                     "'head.weight'");
               });
  cells.cell("a model whose passes exchange gradients is written to as ever", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    leave_gradients(model, 2);
    backward(dist, model, 2);
    const c10::NoGradGuard no_grad;
    model->head->weight.mul_(2);
    EqualLayers other = dist.wrap_model(seeded<EqualLayers>());
    {
      const c10::AutoGradMode grad(true);
      model->zero_grad();
      leave_gradients(model, 1);
    }
    other->head->weight.mul_(2);
    model->zero_grad();
  });
}

// A program's own gradients, which no pass has exchanged.
void check_own_gradients(Cells& cells, DistributedManager& dist) {
  cells.cell("a step on gradients that a program made itself", [&] {
    EqualLayers model = dist.wrap_model(seeded<EqualLayers>());
    const auto optimizer = dist.make_optimizer(model, optim::SGDOptions{});
    const auto set_gradients = [&](float value) {
      for (const at::Tensor& parameter : model->parameters())
        parameter.mutable_grad() = at::full_like(parameter, value);
    };
    set_gradients(2);
    optimizer->step(0.1);
    set_gradients(dist.rank() + 1.0f);
    cells.expect_usage_error([&] { optimizer->step(0.1); },
                             "8 of 8 gradients are not the same on all ranks");
    // Once they are summed, they are one gradient.
    for (const at::Tensor& parameter : model->parameters())
      dist.world()->all_reduce(parameter.grad()).wait();
    optimizer->step(0.1);
    backward(dist, model, 0);
    optimizer->step(0.1);
    optimizer->step(0.1);
    const auto state = dist.full_state_dict(model, kEveryRank);
    for (const NamedTensor& one : state) {
      const at::Tensor first = one.tensor.clone();
      dist.world()->broadcast(first, 0).wait();
      cells.expect_same(one.tensor, first, one.name);
    }
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
    check_refused_alone(cells, dist, strategy);
    check_unsummed_steps(cells, dist);
    if (strategy == SHARD_GRAD_OP || strategy == FULL_SHARD)
      check_saving(cells, dist);
    else
      for (const auto& check : {check_loading, check_loading_between_passes})
        check(cells, dist, strategy);
    if (strategy == NO_SHARD || strategy == SHARD_OPTIMIZER) check_own_gradients(cells, dist);
    check_without_manager(cells, strategy);
    check_left_parts(cells, strategy);
    check_refused_on_one_rank(cells, strategy);
  }
  for (const ShardingStrategy strategy : {NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD})
    check_consistency(cells, strategy);
  for (const ShardingStrategy strategy : {NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD})
    check_exchanged_passes(cells, strategy);
  check_copies(cells);
  for (const int copies : {1, cells.num_ranks()}) {
    DistributedManager dist = setup_distributed(
        {.mode = ParallelMode::FSDP,
         .sharding_strategy = HYBRID_SHARD,
         .mesh = {{"dp_replicate", copies}, {"dp_shard", cells.num_ranks() / copies}},
         .timeout = milliseconds(30'000),
         .device_type = c10::DeviceType::CPU});
    check_unsummed_steps(cells, dist);
  }
}

}  // namespace lockstep

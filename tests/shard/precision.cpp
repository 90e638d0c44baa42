#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

constexpr int kMixedSteps = 4;

const MixedPrecision kBf16 = {.param_dtype = at::kBFloat16};
const MixedPrecision kBf16Compute = {.param_dtype = at::kBFloat16,
                                     .compute = Compute::in_param_dtype};

Options with(const MixedPrecision& precision, Cut cut = Cut::gradients_and_parameters) {
  return scrubbed({.cut = cut, .mixed_precision = precision});
}

Chain seeded_chain(int num_layers = 3, std::int64_t width = 5) {
  torch::manual_seed(11);
  return Chain(num_layers, width);
}

at::Tensor mixed_input(const Cells& cells, int step, std::int64_t width = 5) {
  torch::manual_seed(static_cast<std::uint64_t>(500 * step + cells.rank()));
  return at::randn({3, width});
}

// A replicated model whose weights are rounded to 16 bits; its optimizer steps on the unrounded
// ones.
class Rounded {
 public:
  Rounded(Cells& cells, Chain model) : model_(std::move(model)), parallel_(*model_, cells.group()) {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, parameter] : data_parallel::trained_parameters(*model_))
      masters_.push_back({name, parameter.detach().clone()});
    optimizer_ = optim::make_optimizer(optim::AdamWOptions{}, optim::decay_groups(masters_, 0.1));
    round();
  }

  Chain& model() { return model_; }
  const std::vector<NamedTensor>& masters() const { return masters_; }

  void step(double learning_rate) {
    const auto parameters = data_parallel::trained_parameters(*model_);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      masters_[i].tensor.mutable_grad() = parameters[i].tensor.grad();
      parameters[i].tensor.mutable_grad() = at::Tensor();
    }
    optimizer_->step(learning_rate);
    round();
  }

 private:
  void round() {
    const c10::NoGradGuard no_grad;
    const auto parameters = data_parallel::trained_parameters(*model_);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      parameters[i].tensor.copy_(masters_[i].tensor.to(at::kBFloat16));
  }

  Chain model_;
  replicate::DistributedDataParallel parallel_;
  std::vector<NamedTensor> masters_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

void check_sent_in_16_bits(Cells& cells) {
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters})
    cells.cell("parameters travel in 16 bits, and are computed with and stepped on in 32", [&] {
      Chain model = seeded_chain();
      Rounded twin(cells, seeded_chain());
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16, cut));
      const auto optimizer = adamw(parallel, *model);
      for (int step = 0; step < kMixedSteps; ++step) {
        const at::Tensor input = mixed_input(cells, step);
        optimizer->zero_grad();
        const at::Tensor loss = model->forward(input).pow(2).mean();
        const at::Tensor wanted = twin.model()->forward(input).pow(2).mean();
        cells.expect_same(loss, wanted, fmt::format("step {}: the loss", step));
        loss.backward();
        wanted.backward();
        for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin.model()))
          cells.expect_same(parallel.full_gradient(name), parameter.grad(),
                            fmt::format("step {}: the gradient of {}", step, name));
        optimizer->step(0.05);
        twin.step(0.05);
      }
      const auto state = parallel.full_state_dict({.rank0_only = false});
      for (const auto& [name, master] : twin.masters())
        for (const NamedTensor& got : state)
          if (got.name == name) cells.expect_same(got.tensor, master, name);
    });
}

// Layers of all kinds, with float32 inputs.
struct KindsImpl : nn::Module {
  nn::Embedding embedding{7, 6};
  nn::LSTM lstm{nn::LSTMOptions(6, 6).batch_first(true)};
  nn::LayerNorm norm{nn::LayerNormOptions({6})};
  nn::Conv1d conv{nn::Conv1dOptions(6, 6, 3).padding(1)};
  nn::BatchNorm1d batch_norm{6};
  nn::Linear head{6, 3};
  KindsImpl() {
    register_module("embedding", embedding);
    register_module("lstm", lstm);
    register_module("norm", norm);
    register_module("conv", conv);
    register_module("batch_norm", batch_norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& offsets) {
    at::Tensor hidden = embedding(tokens) + offsets;
    hidden = norm(std::get<0>(lstm(hidden)));
    hidden = batch_norm(conv(hidden.transpose(1, 2)));
    return head(hidden.mean(2));
  }
};
TORCH_MODULE(Kinds);

// LibTorch 1.13 passes these products to a library that throws on some processors (Neoverse V1).
bool libtorch_itself_computes_in_16_bits() {
  try {
    nn::Conv1d conv(nn::Conv1dOptions(6, 6, 3).padding(1));
    nn::Linear head(6, 3);
    conv->to(at::kBFloat16);
    head->to(at::kBFloat16);
    const at::Tensor input = at::ones({2, 6, 4}, at::kBFloat16);
    head(conv(input).mean(2)).sum().backward();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void check_computed_in_16_bits(Cells& cells) {
  cells.cell("operators compute in 16 bits on a model written for 32", [&] {
    Chain model = seeded_chain();
    Rounded twin(cells, seeded_chain());
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16Compute));
    const auto optimizer = adamw(parallel, *model);
    cells.expect(model->layer(0).weight.scalar_type() == at::kBFloat16,
                 "weights are not of 16 bits");
    for (int step = 0; step < kMixedSteps; ++step) {
      const at::Tensor input = mixed_input(cells, step);
      optimizer->zero_grad();
      const at::Tensor output = model->forward(input);
      cells.expect(output.scalar_type() == at::kBFloat16, "the output is not of 16 bits");
      const at::Tensor loss = output.to(at::kFloat).pow(2).mean();
      const at::Tensor wanted = twin.model()->forward(input).pow(2).mean();
      cells.expect(
          std::abs(loss.item<float>() - wanted.item<float>()) < 0.02 * wanted.item<float>(),
          fmt::format("step {}: the loss is {}, in 32 bits {}", step, loss.item<float>(),
                      wanted.item<float>()));
      loss.backward();
      wanted.backward();
      for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin.model())) {
        const at::Tensor got = parallel.full_gradient(name);
        cells.expect(got.scalar_type() == at::kFloat, "a gradient is not kept in 32 bits");
        cells.expect((got - parameter.grad()).norm().item<float>() <
                         0.05 * parameter.grad().norm().item<float>() + 1e-4,
                     fmt::format("step {}: the gradient of {} is far off", step, name));
      }
      optimizer->step(0.01);
      twin.step(0.01);
    }
  });
  cells.cell("layers of every kind in 16 bits", [&] {
    if (!libtorch_itself_computes_in_16_bits()) return;
    torch::manual_seed(3);
    Kinds model;
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16Compute));
    const auto optimizer = adamw(parallel, *model);
    const at::Tensor tokens = at::arange(8).remainder(7).view({2, 4});
    const at::Tensor offsets = at::randn({2, 4, 6});
    float first = 0;
    float last = 0;
    for (int step = 0; step < 12; ++step) {
      optimizer->zero_grad();
      const at::Tensor loss = (model->forward(tokens, offsets).to(at::kFloat) - 1).pow(2).mean();
      last = loss.item<float>();
      if (step == 0) first = last;
      loss.backward();
      optimizer->step(0.02);
    }
    cells.expect(last < 0.5 * first, fmt::format("the loss went from {} to {}", first, last));
  });
  cells.cell("buffers in 16 bits where operators compute in them", [&] {
    for (const Compute compute : {Compute::where_fast, Compute::in_param_dtype}) {
      struct Table : nn::Module {
        Table() { register_buffer("table", at::ones({3})); }
        at::Tensor forward(const at::Tensor& input) { return input; }
      };
      nn::Sequential model(nn::Linear(5, 5), nn::BatchNorm1d(5), std::make_shared<Table>());
      MixedPrecision precision = kBf16;
      precision.buffer_dtype = at::kBFloat16;
      precision.compute = compute;
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(precision));
      const auto wanted = compute == Compute::in_param_dtype ? at::kBFloat16 : at::kFloat;
      cells.expect(model->named_buffers()["2.table"].scalar_type() == wanted,
                   "a buffer is of another type");
      cells.expect(model->named_buffers()["1.running_mean"].scalar_type() == at::kFloat,
                   "a batch norm lost digits");
      cells.expect(model->named_buffers()["1.num_batches_tracked"].scalar_type() == at::kLong,
                   "a count was made a fraction");
    }
  });
}

void check_gradients_in_16_bits(Cells& cells) {
  cells.cell("gradients travel in 16 bits and are kept in 32", [&] {
    Chain model = seeded_chain();
    Chain twin = seeded_chain();
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()),
                                      with({.reduce_dtype = at::kBFloat16}));
    replicate::DistributedDataParallel replicated(*twin, cells.group());
    const at::Tensor input = mixed_input(cells, 0);
    model->forward(input).pow(2).mean().backward();
    twin->forward(input).pow(2).mean().backward();
    bool differs = false;
    for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin)) {
      const at::Tensor got = parallel.full_gradient(name);
      cells.expect(got.scalar_type() == at::kFloat, "a gradient is not kept in 32 bits");
      cells.expect((got - parameter.grad()).abs().max().item<float>() <=
                       0.01 * parameter.grad().abs().max().item<float>(),
                   fmt::format("the gradient of {} is far off", name));
      differs = differs || !at::equal(got, parameter.grad());
    }
    cells.expect(differs, "gradients did not lose a digit, so did not travel in 16 bits");
  });
  cells.cell("passes that are not exchanged add up in 32 bits", [&] {
    // 16 bits would lose this sum, because 256 + 1 is 256 there. It is not rounded before it is
    // sent either.
    MixedPrecision precision = kBf16Compute;
    for (const auto reduce : {at::kFloat, at::kBFloat16}) {
      precision.reduce_dtype = reduce;
      Chain model = seeded_chain(1);
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(precision));
      const auto pass = [&](double factor) {
        (model->layer(0).bias.to(at::kFloat).sum() * factor).backward();
      };
      {
        const auto here = parallel.no_sync();
        pass(256);
        for (int i = 0; i < 3; ++i) pass(1);
      }
      pass(1);
      cells.expect_same(parallel.full_gradient("layers.0.bias"), at::full({5}, 260.0), "the sum");
    }
  });
}

void check_scaler(Cells& cells) {
  cells.cell("a scaled loss gives the same step, to the bit", [&] {
    Chain model = seeded_chain();
    Chain twin = seeded_chain();
    auto parallel = sharded(cells, *model);
    auto plain = sharded(cells, *twin);
    const auto optimizer = adamw(parallel, *model);
    const auto twin_optimizer = adamw(plain, *twin);
    optim::GradScaler scaler({.initial_scale_power = 10});
    for (int step = 0; step < kMixedSteps; ++step) {
      const at::Tensor input = mixed_input(cells, step);
      optimizer->zero_grad();
      twin_optimizer->zero_grad();
      scaler.scale(model->forward(input).pow(2).mean()).backward();
      twin->forward(input).pow(2).mean().backward();
      cells.expect(scaler.update(parallel.unscale_gradients(scaler)), "the step was skipped");
      optimizer->step(0.05);
      twin_optimizer->step(0.05);
    }
    const auto wanted = plain.full_state_dict({.rank0_only = false});
    const auto got = parallel.full_state_dict({.rank0_only = false});
    for (std::size_t i = 0; i < wanted.size(); ++i)
      cells.expect_same(got[i].tensor, wanted[i].tensor, wanted[i].name);
  });
  cells.cell("an overflow on one rank skips the step on all of them", [&] {
    Chain model = seeded_chain();
    auto parallel = sharded(cells, *model);
    const auto optimizer = adamw(parallel, *model);
    optim::GradScaler scaler({.initial_scale_power = 10, .hysteresis = 1});
    const at::Tensor input = mixed_input(cells, 0);
    // The infinity is in one element of one gradient, which is on one rank.
    const double factor =
        cells.rank() == cells.num_ranks() - 1 ? std::numeric_limits<float>::infinity() : 1;
    (scaler.scale(model->forward(input).pow(2).mean()) +
     model->layer(2).weight.index({0, 0}) * factor)
        .backward();
    cells.expect(!scaler.update(parallel.unscale_gradients(scaler)), "the step was not skipped");
    cells.expect(scaler.loss_scale() == 512, fmt::format("the scale is {}", scaler.loss_scale()));
  });
}

void check_edits(Cells& cells) {
  cells.cell("an edit in 16 bits leaves other elements their digits", [&] {
    Chain model = seeded_chain(2);
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16Compute));
    const auto before = parallel.full_state_dict({.rank0_only = false});
    {
      const c10::NoGradGuard no_grad;
      model->layer(1).weight.select(0, 2).fill_(0.5);
    }
    const auto after = parallel.full_state_dict({.rank0_only = false});
    for (std::size_t i = 0; i < before.size(); ++i) {
      at::Tensor wanted = before[i].tensor.clone();
      if (before[i].name == "layers.1.weight") wanted.select(0, 2).fill_(0.5);
      cells.expect_same(after[i].tensor, wanted, before[i].name);
    }
    cells.expect(!at::equal(after[0].tensor, after[0].tensor.to(at::kBFloat16).to(at::kFloat)),
                 "the test's own weights have no more digits than 16 bits hold");
  });
  cells.cell("state goes in and out in 32 bits", [&] {
    Chain model = seeded_chain(2);
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16Compute));
    auto state = parallel.full_state_dict({.rank0_only = false});
    for (NamedTensor& one : state) one.tensor.add_(0.001);
    parallel.load_full_state_dict(state);
    const auto back = parallel.full_state_dict({.rank0_only = false});
    for (std::size_t i = 0; i < state.size(); ++i)
      cells.expect_same(back[i].tensor, state[i].tensor, state[i].name);
    const auto held = parallel.full_parameters();
    cells.expect_same(model->layer(0).weight.detach(), state[0].tensor.to(at::kBFloat16),
                      "what is gathered");
  });
}

void check_choices(Cells& cells) {
  cells.cell("choices that make no sense", [&] {
    const auto wrap = [&](const Options& options) {
      Chain model = seeded_chain(2);
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()), options);
    };
    cells.expect_usage_error([&] { wrap({.mixed_precision = {.param_dtype = at::kDouble}}); },
                             "param_dtype of Double");
    cells.expect_usage_error([&] { wrap({.mixed_precision = {.reduce_dtype = at::kInt}}); },
                             "reduce_dtype of Int");
    cells.expect_usage_error([&] { wrap({.mixed_precision = {.buffer_dtype = at::kHalf}}); },
                             "give both");
    cells.expect_usage_error([&] { wrap({.cpu_offload = {.offload_params = true}}); },
                             "set offload_optimizer as well");
    cells.expect_usage_error(
        [&] {
          wrap({.cut = Cut::gradients,
                .cpu_offload = {.offload_optimizer = true, .offload_params = true}});
        },
        "use FULL_SHARD");
  });
  cells.cell("types other than Float stay what they are", [&] {
    Chain model = seeded_chain(2);
    model->to(at::kDouble);
    FullyShardedDataParallel parallel(*model, shard_over(cells.group()), with(kBf16Compute));
    cells.expect(model->layer(0).weight.scalar_type() == at::kDouble, "Double was converted");
    model->forward(at::randn({2, 5}, at::kDouble)).sum().backward();
  });
}

// A replicated model in floats; its optimizer steps on weights and gradients of 16 bits, whole on
// every rank.
class Narrow {
 public:
  Narrow(Cells& cells, Chain model, const MixedPrecision& precision)
      : type_(*precision.master_dtype),
        model_(std::move(model)),
        parallel_(*model_, cells.group()) {
    for (const auto& [name, parameter] : data_parallel::trained_parameters(*model_))
      masters_.push_back({name, parameter.detach().to(type_)});
    std::vector<optim::ParameterGroup> groups = optim::decay_groups(masters_, 0.1);
    for (optim::ParameterGroup& group : groups) group.sixteen_bits = precision.master_rounding;
    optimizer_ = optim::make_optimizer(optim::AdamWOptions{}, std::move(groups));
    widen();
  }

  Chain& model() { return model_; }
  const std::vector<NamedTensor>& masters() const { return masters_; }
  std::vector<NamedTensor> state() const { return optimizer_->state(); }

  void take_gradients() {
    const auto parameters = data_parallel::trained_parameters(*model_);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      masters_[i].tensor.mutable_grad() = parameters[i].tensor.grad().to(type_);
      parameters[i].tensor.mutable_grad() = at::Tensor();
    }
  }
  void step(double learning_rate) {
    optim::clip_gradients(masters_, 0.05);
    optimizer_->step(learning_rate);
    widen();
  }

 private:
  void widen() {
    const c10::NoGradGuard no_grad;
    const auto parameters = data_parallel::trained_parameters(*model_);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      parameters[i].tensor.copy_(masters_[i].tensor);
  }

  at::ScalarType type_;
  Chain model_;
  replicate::DistributedDataParallel parallel_;
  std::vector<NamedTensor> masters_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

struct NarrowKind {
  std::string name;
  std::function<FullyShardedDataParallel(torch::nn::Module& module, const MixedPrecision&)> make;
};

std::vector<NarrowKind> narrow_kinds(Cells& cells) {
  const auto over_all = [&cells](Options options) {
    return [&cells, options](torch::nn::Module& module, const MixedPrecision& precision) {
      Options with_precision = options;
      with_precision.mixed_precision = precision;
      return FullyShardedDataParallel(module, shard_over(cells.group()), with_precision);
    };
  };
  return {{"SHARD_GRAD_OP", over_all(scrubbed({.cut = Cut::gradients}))},
          {"FULL_SHARD", over_all(scrubbed())},
          {"FULL_SHARD in one unit", over_all(scrubbed({.units = one_unit()}))},
          {"HYBRID_SHARD, a copy on each rank",
           [&cells](torch::nn::Module& module, const MixedPrecision& precision) {
             const auto& all = cells.group();
             return FullyShardedDataParallel(
                 module, shard_over(all, all->split(all->rank(), 0, "copy"), all), with(precision));
           }}};
}

void expect_same_tensors(Cells& cells, const std::vector<NamedTensor>& got,
                         const std::vector<NamedTensor>& wanted) {
  for (const auto& [name, tensor] : wanted)
    for (const NamedTensor& one : got)
      if (one.name == name) {
        cells.expect(one.tensor.scalar_type() == tensor.scalar_type(),
                     name + " is of another type");
        cells.expect_same(one.tensor, tensor, name);
      }
}

void check_narrow_masters(Cells& cells) {
  for (const NarrowKind& kind : narrow_kinds(cells))
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
      for (const bool in_state : {false, true})
        cells.cell(
            fmt::format("{} on weights in {}{}", kind.name, c10::toString(type),
                        in_state ? ", and their state" : ""),
            [&] {
              const MixedPrecision precision = {
                  .param_dtype = type,
                  .master_dtype = type,
                  .master_rounding = {.in_state = in_state, .seed = 3}};
              Chain model = seeded_chain(3, 20);
              Narrow twin(cells, seeded_chain(3, 20), precision);
              FullyShardedDataParallel parallel = kind.make(*model, precision);
              const auto optimizer = adamw(parallel, *model);
              Chain later = seeded_chain(3, 20);
              std::optional<FullyShardedDataParallel> resumed;
              std::unique_ptr<optim::Optimizer> resumed_optimizer;
              for (int step = 0; step < kMixedSteps; ++step) {
                const at::Tensor input = mixed_input(cells, step, 20);
                const auto pass = [&](Chain& net) { net->forward(input).pow(2).mean().backward(); };
                optimizer->zero_grad();
                pass(model);
                pass(twin.model());
                twin.take_gradients();
                for (const auto& [name, master] : twin.masters())
                  cells.expect_same(parallel.full_gradient(name), master.grad(),
                                    fmt::format("step {}: the gradient of {}", step, name));
                parallel.clip_gradients(0.05);
                optimizer->step(0.002);
                twin.step(0.002);
                if (resumed) {
                  resumed_optimizer->zero_grad();
                  pass(later);
                  resumed->clip_gradients(0.05);
                  resumed_optimizer->step(0.002);
                }
                if (step != 1) continue;
                // From here on, in one unit, another run goes on with the state of this one.
                resumed.emplace(*later, shard_over(cells.group()),
                                scrubbed({.units = one_unit(), .mixed_precision = precision}));
                resumed_optimizer = adamw(*resumed, *later);
                resumed->load_full_state_dict(parallel.full_state_dict());
                resumed->load_full_optimizer_state(*resumed_optimizer,
                                                   parallel.full_optimizer_state(*optimizer, {}));
              }
              const auto state = parallel.full_state_dict({.rank0_only = false});
              expect_same_tensors(cells, state, twin.masters());
              expect_same_tensors(cells, resumed->full_state_dict({.rank0_only = false}), state);
              expect_same_tensors(cells,
                                  parallel.full_optimizer_state(*optimizer, {.rank0_only = false}),
                                  twin.state());
            });
  cells.cell("weights, gradients and state of 16 bits take 12 bytes a parameter, or 8", [&] {
    for (const bool in_state : {false, true}) {
      Chain model = seeded_chain(4, 200);
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()),
                                        with({.param_dtype = at::kBFloat16,
                                              .master_dtype = at::kBFloat16,
                                              .master_rounding = {.in_state = in_state}}));
      const auto optimizer = adamw(parallel, *model);
      model->forward(mixed_input(cells, 0, 200)).pow(2).mean().backward();
      optimizer->step(0.001);
      const MemoryReport report = parallel.memory_report();
      const auto parameters = static_cast<double>(report.num_parameters);
      // On one rank all units stay gathered, in the floats that a CPU computes with.
      const double gathered = cells.num_ranks() == 1 ? 4 * parameters : 0;
      const double wanted = gathered + (in_state ? 8 : 12) * parameters / cells.num_ranks();
      cells.expect(std::abs(static_cast<double>(report.at_rest()) - wanted) <= 0.02 * wanted,
                   fmt::format("{} bytes at rest and not {:.0f}", report.at_rest(), wanted));
    }
  });
  cells.cell("types of weights that do not go together are refused", [&] {
    Chain model = seeded_chain();
    const auto refused = [&](const MixedPrecision& precision, const std::string& why) {
      cells.expect_usage_error(
          [&] { FullyShardedDataParallel(*model, shard_over(cells.group()), with(precision)); },
          why);
    };
    refused({.master_dtype = at::kBFloat16}, "no param_dtype");
    refused({.param_dtype = at::kHalf, .master_dtype = at::kBFloat16}, "a param_dtype of Half");
    refused({.param_dtype = at::kFloat, .master_dtype = at::kFloat}, "a master_dtype of Float");
  });
}

}  // namespace

void check_precision(Cells& cells) {
  check_narrow_masters(cells);
  check_sent_in_16_bits(cells);
  check_computed_in_16_bits(cells);
  check_gradients_in_16_bits(cells);
  check_scaler(cells);
  check_edits(cells);
  check_choices(cells);
}

}  // namespace lockstep::shard

#include "plain_tensor.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <lockstep/distributed/distributed.h>

namespace lockstep {

namespace {

using ranks::Cells;
using tensor::Cut;

constexpr std::int64_t kNetWidth = 8, kHeads = 4, kTokens = 10, kLength = 5, kBatch = 3;
constexpr double kTolerance = 1e-9;

// Attention and an MLP as users write them.
struct Block : torch::nn::Module {
  Block() {
    norm1 =
        register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kNetWidth})));
    norm2 =
        register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kNetWidth})));
    query = register_module("query", torch::nn::Linear(kNetWidth, kNetWidth));
    key = register_module("key", torch::nn::Linear(kNetWidth, kNetWidth));
    value = register_module("value", torch::nn::Linear(kNetWidth, kNetWidth));
    out = register_module("out", torch::nn::Linear(kNetWidth, kNetWidth));
    fc1 = register_module("fc1", torch::nn::Linear(kNetWidth, 3 * kNetWidth));
    fc2 = register_module("fc2", torch::nn::Linear(3 * kNetWidth, kNetWidth));
  }

  at::Tensor attention(const at::Tensor& x) {  // [batch, length, width]
    const auto heads = [&](torch::nn::Linear& layer) {
      return layer(x).view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2);
    };
    const at::Tensor scores =
        at::matmul(heads(query), heads(key).transpose(2, 3)) / std::sqrt(kNetWidth / kHeads);
    const at::Tensor mixed = at::matmul(scores.softmax(-1), heads(value));
    return out(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kNetWidth}));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + fc2(at::gelu(fc1(norm2(x))));
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};

// A frozen layer is among those that are cut, and one is used in every second step only.
struct Net : torch::nn::Module {
  Net() {
    embedding = register_module("embedding", torch::nn::Embedding(kTokens, kNetWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<Block>());
    seldom = register_module("seldom", torch::nn::Linear(kNetWidth, kNetWidth));
    frozen = register_module("frozen", torch::nn::Linear(kNetWidth, kNetWidth));
    head = register_module("head", torch::nn::Linear(kNetWidth, kTokens));
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    to(at::kDouble);
  }

  at::Tensor forward(const at::Tensor& tokens, bool all_of_it) {
    at::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    if (all_of_it) x = x + at::tanh(seldom(x));
    return head(x + frozen(x));
  }

  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear seldom{nullptr}, frozen{nullptr}, head{nullptr};
};

const tensor::Plan kPlan = {{"embedding", Cut::row},       {"blocks.*.query", Cut::column},
                            {"blocks.*.key", Cut::column}, {"blocks.*.value", Cut::column},
                            {"blocks.*.out", Cut::row},    {"blocks.*.fc1", Cut::column},
                            {"blocks.*.fc2", Cut::row},    {"seldom", Cut::row},
                            {"frozen", Cut::row}};

DistributedManager job_with_plan(std::optional<ShardingStrategy> strategy,
                                 shard::Options fsdp = {}) {
  return setup_distributed({.mode = ParallelMode::HYBRID,
                            .sharding_strategy = strategy,
                            .model_parallel = {.tensor = 2},
                            .tensor_plan = kPlan,
                            .timeout = milliseconds(30'000),
                            .device_type = c10::DeviceType::CPU,
                            .fsdp = std::move(fsdp)});
}

std::shared_ptr<Net> seeded_net(std::uint64_t seed = 3) {
  torch::manual_seed(seed);
  return std::make_shared<Net>();
}

at::Tensor tokens_of(int step, int data_rank) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + data_rank));
  return at::randint(kTokens, {kBatch, kLength}, at::kLong);
}

// A sum over the batch.
at::Tensor loss_of(Net& net, int step, int data_rank) {
  const at::Tensor tokens = tokens_of(step, data_rank);
  const at::Tensor wanted = tokens.add(1).remainder(kTokens);
  return at::cross_entropy_loss(net.forward(tokens, step % 2 == 0).flatten(0, 1), wanted.flatten(),
                                {}, at::Reduction::Sum);
}

std::vector<NamedTensor> trained(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters;
  for (const auto& item : module.named_parameters())
    if (item.value().requires_grad()) parameters.push_back({item.key(), item.value()});
  return parameters;
}

void expect_within(Cells& cells, const at::Tensor& got, const at::Tensor& wanted,
                   const std::string& what) {
  const double error = (got - wanted).abs().max().item<double>();
  const double scale = std::max(wanted.abs().max().item<double>(), 1e-3);
  cells.expect(error <= kTolerance * scale, fmt::format("{} is off by {}", what, error));
}

// One process on the batches of all data ranks.
class Whole {
 public:
  explicit Whole(int data_size)
      : data_size_(data_size),
        adamw_(optim::make_optimizer(optim::AdamWOptions{},
                                     optim::decay_groups(trained(*net_), 0.1))) {}

  Net& net() { return *net_; }
  double step(int number, int num_passes, double max_norm) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int pass = 0; pass < num_passes; ++pass)
      for (int rank = 0; rank < data_size_; ++rank)
        loss = loss + loss_of(*net_, number * num_passes + pass, rank);
    loss_ = loss.item<double>() / (kBatch * data_size_ * num_passes);
    (loss / static_cast<double>(kBatch * data_size_ * num_passes)).backward();
    const double norm = optim::clip_gradients(trained(*net_), max_norm).norm;
    adamw_->step(0.05);
    adamw_->zero_grad();
    return norm;
  }
  double loss() const { return loss_; }

 private:
  int data_size_;
  std::shared_ptr<Net> net_ = seeded_net();
  std::unique_ptr<optim::Optimizer> adamw_;
  double loss_ = 0;
};

void expect_same_weights(DistributedManager& dist, Cells& cells, const std::shared_ptr<Net>& model,
                         Net& whole) {
  const auto state = dist.full_state_dict(model);
  if (!dist.is_main()) return;
  const auto parameters = whole.named_parameters();
  cells.expect(state.size() == parameters.size(), "tensors are missing");
  for (const auto& [name, tensor] : state)
    expect_within(cells, tensor, parameters[name].detach(), name);
}

// Steps of two passes each, by backward() with counts, clipped, with our optimizer.
void check_trained(Cells& cells, std::optional<ShardingStrategy> strategy,
                   shard::Options fsdp = {}) {
  DistributedManager dist = job_with_plan(strategy, std::move(fsdp));
  Whole whole(dist.data_size());
  const auto model = dist.wrap_model(seeded_net(3 + dist.rank()));
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
  for (int step = 0; step < 3; ++step) {
    for (int pass = 0; pass < 2; ++pass) {
      std::optional<data_parallel::NoSync> guard;
      if (pass == 0) guard.emplace(dist.no_sync(model));
      dist.backward(model, loss_of(*model, 2 * step + pass, dist.data_rank()), kBatch);
    }
    const double wanted = whole.step(step, 2, 0.5);
    const double norm = dist.clip_gradients(model, 0.5).norm;
    cells.expect(std::abs(norm - wanted) <= kTolerance * wanted,
                 fmt::format("the norm is {} and not {}", norm, wanted));
    cells.expect(
        std::abs(dist.totals(model).mean_loss() - whole.loss()) <= kTolerance * whole.loss(),
        "the loss is another");
    adamw->step(0.05);
    adamw->zero_grad();
    for (const auto& item : model->named_parameters())
      cells.expect(!item.value().grad().defined(), item.key() + " still has a gradient");
  }
  expect_same_weights(dist, cells, model, whole.net());

  // What was gathered goes back to where it was.
  const auto state = dist.full_state_dict(model);
  const auto moments = dist.full_optimizer_state(model, *adamw);
  const auto another = dist.wrap_model(seeded_net(9));
  const auto its = dist.make_optimizer(another, optim::AdamWOptions{}, 0.1);
  dist.load_full_state_dict(another, state);
  dist.load_full_optimizer_state(another, *its, moments);
  for (int pass = 0; pass < 2; ++pass) {
    std::optional<data_parallel::NoSync> guard;
    if (pass == 0) guard.emplace(dist.no_sync(another));
    dist.backward(another, loss_of(*another, 6 + pass, dist.data_rank()), kBatch);
  }
  whole.step(3, 2, 0.5);
  dist.clip_gradients(another, 0.5);
  its->step(0.05);
  expect_same_weights(dist, cells, another, whole.net());
}

// The user's own loss.backward(), with LibTorch's optimizer and clipping.
void check_with_libtorch(Cells& cells) {
  DistributedManager dist = job_with_plan({});
  const auto whole = seeded_net();
  const auto model = dist.wrap_model(seeded_net(3 + dist.rank()));
  torch::optim::AdamW of_whole(whole->parameters(), torch::optim::AdamWOptions(0.05));
  torch::optim::AdamW of_model(model->parameters(), torch::optim::AdamWOptions(0.05));
  for (int step = 0; step < 4; ++step) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < dist.data_size(); ++rank) sum = sum + loss_of(*whole, step, rank);
    of_whole.zero_grad();
    (sum / static_cast<double>(kBatch * dist.data_size())).backward();
    of_model.zero_grad();
    (loss_of(*model, step, dist.data_rank()) / static_cast<double>(kBatch)).backward();
    const double wanted = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5);
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    cells.expect(std::abs(norm - wanted) <= kTolerance * wanted,
                 fmt::format("the norm is {} and not {}", norm, wanted));
    of_whole.step();
    of_model.step();
  }
  expect_same_weights(dist, cells, model, *whole);
}

// Gradients that were accumulated and then dropped count for nothing.
void check_dropped(Cells& cells) {
  DistributedManager dist = job_with_plan({});
  const auto model = dist.wrap_model(seeded_net());
  {
    const auto guard = dist.no_sync(model);
    (loss_of(*model, 0, dist.data_rank()) / static_cast<double>(kBatch)).backward();
  }
  const at::Tensor& weight = model->blocks[0]->as<Block>()->fc1->weight;
  cells.expect(weight.grad().defined(), "the gradient of a pass under no_sync() is not shown");
  for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  (loss_of(*model, 1, dist.data_rank()) / static_cast<double>(kBatch)).backward();
  const at::Tensor got = tensor::full_tensor(weight.grad());
  const auto whole = seeded_net();
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (int rank = 0; rank < dist.data_size(); ++rank) sum = sum + loss_of(*whole, 1, rank);
  (sum / static_cast<double>(kBatch * dist.data_size())).backward();
  expect_within(cells, got, whole->blocks[0]->as<Block>()->fc1->weight.grad(), "the gradient");
}

// Hands a parameter to code that is no operator.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.mul(2);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].mul(2)};
  }
};

void check_refused(Cells& cells) {
  DistributedManager dist = job_with_plan({});
  const auto model = dist.wrap_model(seeded_net());
  cells.expect_usage_error(
      [&] {
        torch::serialize::OutputArchive archive;
        model->save(archive);
      },
      "full_state_dict()");
  cells.expect_usage_error([&] { Doubled::apply(model->seldom->weight).sum().backward(); },
                           "is no operator of LibTorch's");
  cells.expect_usage_error([&] { model->to(at::kFloat); }, "convert the model before");
  cells.expect_usage_error(
      [&] {
        model->seldom->weight.set_data(at::zeros({kNetWidth, kNetWidth}, at::kDouble));
      },
      "set_data()");
  const auto thawed = dist.wrap_model(seeded_net());
  thawed->frozen->weight.set_requires_grad(true);
  cells.expect_usage_error([&] { loss_of(*thawed, 0, 0).backward(); }, "was frozen");
}

// Its tensors are large enough to be built without memory.
struct Wide : torch::nn::Module {
  Wide() {
    register_module("table", table);
    register_module("attention", attention);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("plain", plain);
    const torch::NoGradGuard no_grad;
    attention->in_proj_bias.normal_(0, 0.1);
    plain->weight.copy_(plain->weight.flip({0}) * 2);
  }

  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = table(tokens);
    const at::Tensor mixed = x + std::get<0>(attention(x, x, x));
    return plain(mixed + fc2(at::gelu(fc1(mixed))));
  }

  torch::nn::Embedding table{256, 96};
  torch::nn::MultiheadAttention attention{96, 4};
  torch::nn::Linear fc1{96, 200}, fc2{200, 96}, plain{96, 400};
};

DistributedManager wide_job(std::optional<ShardingStrategy> strategy) {
  return setup_distributed({.mode = ParallelMode::HYBRID,
                            .sharding_strategy = strategy,
                            .model_parallel = {.tensor = 2},
                            .tensor_plan = {{"table", Cut::row},
                                            {"attention", Cut::heads},
                                            {"fc1", Cut::column},
                                            {"fc2", Cut::row}},
                            .timeout = milliseconds(30'000),
                            .device_type = c10::DeviceType::CPU,
                            .fsdp = {}});
}

// Weights are those of a model that is made whole and then cut, to the bit, and so is training.
void check_built(Cells& cells, std::optional<ShardingStrategy> strategy) {
  DistributedManager dist = wide_job(strategy);
  const auto seeded = [] {
    torch::manual_seed(3);
    return std::make_shared<Wide>();
  };
  const auto wrapped = dist.wrap_model(seeded());
  const auto built = dist.build_model(seeded);
  const auto expect_same = [&](const std::string& when) {
    const auto wanted = dist.full_state_dict(wrapped), got = dist.full_state_dict(built);
    cells.expect(got.size() == wanted.size(), "tensors are missing " + when);
    for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i)
      cells.expect_same(got[i].tensor, wanted[i].tensor, wanted[i].name + " " + when);
  };
  expect_same("at first");
  const auto whole = seeded()->named_parameters();
  for (const auto& [name, tensor] : dist.full_state_dict(built))
    cells.expect_same(tensor, whole[name].detach(), name + " of one process");
  for (const auto& model : {wrapped, built}) {
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor tokens = tokens_of(step, dist.data_rank());
      dist.backward(model, model->forward(tokens).square().sum(), kBatch);
      dist.clip_gradients(model, 0.5);
      adamw->step(0.01);
      adamw->zero_grad();
    }
  }
  expect_same("after two steps");
}

void check_built_apart(Cells& cells) {
  DistributedManager dist = wide_job(ShardingStrategy::FULL_SHARD);
  const auto tensor_rank = dist.mesh().axis("tp")->rank();
  torch::manual_seed(static_cast<std::uint64_t>(3 + tensor_rank));
  cells.expect_usage_error([&] { dist.build_model([] { return std::make_shared<Wide>(); }); },
                           "seeded differently before the model was made");
  torch::manual_seed(3);
  cells.expect_usage_error(
      [&] {
        dist.build_model([&] {
          auto model = std::make_shared<Wide>();
          if (tensor_rank == 1) at::randn({1});
          return model;
        });
      },
      "drew other numbers while they made the model");
  torch::manual_seed(3);
  cells.expect_usage_error([&] { dist.build_model([] { return std::make_shared<Net>(); }); },
                           "is called 'table'");
}

}  // namespace

void check_plain_tensor(Cells& cells) {
  using enum ShardingStrategy;
  for (const auto& [strategy, name] :
       {std::pair(NO_SHARD, "NO_SHARD"), std::pair(SHARD_OPTIMIZER, "SHARD_OPTIMIZER"),
        std::pair(SHARD_GRAD_OP, "SHARD_GRAD_OP"), std::pair(FULL_SHARD, "FULL_SHARD")})
    cells.cell(fmt::format("cut by a plan, with {}", name),
               [&, strategy = strategy] { check_trained(cells, strategy); });
  cells.cell("one unit at a time", [&] {
    check_trained(cells, FULL_SHARD, {.max_live_units = 1, .scrub_freed_memory = true});
  });
  cells.cell("with LibTorch's optimizer", [&] { check_with_libtorch(cells); });
  cells.cell("accumulated and dropped", [&] { check_dropped(cells); });
  cells.cell("what is refused", [&] { check_refused(cells); });
  for (const auto& [strategy, name] :
       {std::pair(NO_SHARD, "NO_SHARD"), std::pair(SHARD_OPTIMIZER, "SHARD_OPTIMIZER"),
        std::pair(SHARD_GRAD_OP, "SHARD_GRAD_OP"), std::pair(FULL_SHARD, "FULL_SHARD")})
    cells.cell(fmt::format("built without memory, with {}", name),
               [&, strategy = strategy] { check_built(cells, strategy); });
  cells.cell("built apart", [&] { check_built_apart(cells); });
}

}  // namespace lockstep

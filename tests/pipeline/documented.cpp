// The programs of docs/pipeline.md, which the ranks of a test run. The page has the text between
// the marks.
#include <map>
#include <memory>

#include <torch/nn.h>
#include <torch/utils.h>

#include "executor.h"

// documented: stages
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>

double train_in_stages(const std::shared_ptr<lockstep::comm::Communicator>& group,
                       const at::Tensor& batch, const at::Tensor& targets) {
  namespace pipeline = lockstep::pipeline;
  const auto schedule = pipeline::make_schedule(
      pipeline::ScheduleKind::zb_h1, {.num_ranks = group->size(), .num_micro_batches = 4});
  torch::nn::Linear layer(16, 16);
  pipeline::Stage stage;
  stage.parameters = layer->parameters();
  stage.forward = [=](int micro_batch, const std::vector<at::Tensor>& inputs) mutable {
    const auto part = static_cast<std::size_t>(micro_batch);
    const at::Tensor x = inputs.empty() ? batch.chunk(4)[part] : inputs[0];
    const at::Tensor y = torch::tanh(layer->forward(x));
    if (group->rank() + 1 < group->size()) return std::vector{y};
    return std::vector{(y - targets.chunk(4)[part]).square().sum()};
  };
  pipeline::Pipeline pipe(schedule, {{group->rank(), stage}}, group);
  double loss = 0;
  for (int step = 0; step < 3; ++step) {
    layer->zero_grad();
    loss = pipe.run_step() / static_cast<double>(targets.numel());
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : stage.parameters) parameter.sub_(0.01 * parameter.grad());
  }
  const std::string picture = pipeline::draw_svg(pipe.timeline());  // as measured
  return loss;
}
// documented: pipe
#include <lockstep/parallel/pipeline/pipe.h>

double train_in_a_pipe(const std::shared_ptr<lockstep::comm::Communicator>& group,
                       const at::Tensor& batch, const at::Tensor& targets) {
  namespace pipeline = lockstep::pipeline;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 16), torch::nn::Tanh());
  pipeline::Pipe pipe(model, group, {.chunks = 4, .checkpoint = pipeline::Checkpoint::except_last});
  double loss = 0;
  for (int step = 0; step < 3; ++step) {
    for (at::Tensor& parameter : pipe.parameters()) parameter.mutable_grad() = at::Tensor();
    loss = pipe.forward_backward(batch, targets, [](const at::Tensor& y, const at::Tensor& target) {
      return (y - target).square().sum();
    });
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : pipe.parameters()) parameter.sub_(0.001 * parameter.grad());
  }
  return loss / static_cast<double>(targets.numel());
}
// documented: listed
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/split_model.h>

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(32, 32))) {}
  at::Tensor forward(const at::Tensor& x) { return x + torch::tanh(linear->forward(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 6; ++i) blocks->push_back(Block());
  }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(16, 32));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(32, 16));
};
TORCH_MODULE(Net);

double train_listed_blocks(const std::shared_ptr<lockstep::comm::Communicator>& group,
                           const at::Tensor& batch, const at::Tensor& targets) {
  namespace pipeline = lockstep::pipeline;
  torch::manual_seed(1);  // the same weights on every rank
  Net net;
  pipeline::ListedModel listed;
  listed.model = net.ptr();
  listed.blocks = pipeline::blocks_of<Block>(*net->blocks);
  listed.blocks.insert(listed.blocks.begin(), pipeline::block_of(net->in));
  listed.blocks.push_back({{net->norm.ptr(), net->out.ptr()}, [=](const auto& x) mutable {
                             return std::vector{net->out->forward(net->norm->forward(x[0]))};
                           }});
  listed.input = [=](int micro_batch) {
    return std::vector{batch.chunk(4)[static_cast<std::size_t>(micro_batch)]};
  };
  listed.loss = [=](int micro_batch, const auto& y) {
    return (y[0] - targets.chunk(4)[static_cast<std::size_t>(micro_batch)]).square().sum();
  };

  const auto schedule = pipeline::make_schedule(
      pipeline::ScheduleKind::zb_v, {.num_ranks = group->size(), .num_micro_batches = 4});
  auto stages = pipeline::split_model(listed, schedule.rank_of_stage, *group);
  pipeline::Pipeline pipe(schedule, stages.mine, group, {.tied = stages.tied});
  double loss = 0;
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();  // net has this rank's parameters, under their names
    loss = pipe.run_step() / static_cast<double>(targets.numel());
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.sub_(0.001 * parameter.grad());
  }
  return loss;
}
// documented: devices
#include <lockstep/parallel/pipeline/model_parallel.h>

// Devices such as {{torch::kCUDA, 0}, {torch::kCUDA, 1}}.
double step_over(const std::vector<c10::Device>& devices, const torch::nn::Sequential& layers,
                 const at::Tensor& batch, const at::Tensor& targets) {
  lockstep::pipeline::ModelParallel model(layers, devices);
  at::Tensor loss = torch::mse_loss(model->forward(batch), targets.to(model->output_device()));
  loss.backward();
  return loss.item<double>();
}
// documented: end

namespace lockstep::pipeline {

void check_documented(ranks::Cells& cells) {
  torch::manual_seed(5);
  const at::Tensor batch = at::randn({8, 16}), targets = at::rand({8, 16});
  for (const auto program : {train_in_stages, train_in_a_pipe, train_listed_blocks})
    cells.cell("a program of docs/pipeline.md", [&] {
      at::Tensor loss = at::tensor(program(cells.group(), batch, targets), at::kDouble);
      cells.expect(loss.item<double>() > 0 && loss.item<double>() < 10, "no loss");
      const at::Tensor first = loss.clone();
      cells.group()->broadcast(first, 0).wait();
      cells.expect_same(loss, first, "the loss");
    });
  cells.cell("the step over devices of docs/pipeline.md", [&] {
    const torch::nn::Sequential layers(torch::nn::Linear(16, 8), torch::nn::Linear(8, 16));
    cells.expect(step_over({at::kCPU, at::kCPU}, layers, batch, targets) > 0, "no loss");
    for (const at::Tensor& parameter : layers->parameters())
      cells.expect(parameter.grad().defined(), "no gradient");
  });
}

}  // namespace lockstep::pipeline

#include <cmath>
#include <map>
#include <sstream>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include "executor.h"

namespace lockstep::pipeline {

namespace {

namespace nn = torch::nn;

constexpr int kChunks = 4;

struct MixImpl : nn::Module {
  explicit MixImpl(int width) : up(8, width), down(width, 8) {
    register_module("up", up);
    register_module("down", down);
  }

  at::Tensor forward(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }

  nn::Linear up, down;
};
TORCH_MODULE(Mix);

// Has activations that write into their input, norms with statistics, and names.
nn::Sequential layers() {
  torch::manual_seed(8);
  nn::Sequential model;
  model->push_back("first", nn::Linear(6, 8));
  for (int i = 0; i < 4; ++i) {
    const std::string number = std::to_string(i);
    model->push_back("relu" + number, nn::ReLU(nn::ReLUOptions().inplace(true)));
    model->push_back("norm" + number, nn::BatchNorm1d(8));
    model->push_back("mix" + number, Mix(16 * (i + 1)));
  }
  model->push_back("out", nn::Linear(8, 3));
  return model;
}

at::Tensor pipe_input() {
  torch::manual_seed(9);
  return at::randn({12, 6});
}

at::Tensor pipe_target() { return at::arange(12) % 3; }

at::Tensor summed_loss(const at::Tensor& output, const at::Tensor& target) {
  return at::cross_entropy_loss(output, target, {}, at::Reduction::Sum);
}

double whole_step(nn::Sequential& model) {
  double sum = 0;
  for (int i = 0; i < kChunks; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const at::Tensor loss = summed_loss(model->forward(pipe_input().chunk(kChunks)[at]),
                                        pipe_target().chunk(kChunks)[at]);
    sum += loss.item<double>();
    loss.backward();
  }
  return sum;
}

void expect_as_whole(ranks::Cells& cells, const Pipe& pipe, const nn::Sequential& whole) {
  const auto parameters = whole->named_parameters();
  const auto buffers = whole->named_buffers();
  for (const auto& [index, part] : pipe.stages()) {
    for (const auto& item : part->named_parameters())
      cells.expect_same(item.value().grad(), parameters[item.key()].grad(), item.key());
    for (const auto& item : part->named_buffers())
      cells.expect_same(item.value(), buffers[item.key()], item.key());
  }
}

void check_pipe(ranks::Cells& cells, const PipeOptions& options) {
  nn::Sequential model = layers(), whole = layers();
  Pipe pipe(model, cells.group(), options);
  for (int step = 0; step < 2; ++step) {
    const double wanted = whole_step(whole);
    const bool first = cells.rank() == 0;
    // Only ranks that need it have the batch; in a V the first rank has both ends.
    const bool last =
        options.schedule == ScheduleKind::zb_v ? first : cells.rank() + 1 == cells.num_ranks();
    const double loss = pipe.forward_backward(first ? pipe_input() : at::Tensor(),
                                              last ? pipe_target() : at::Tensor(), summed_loss);
    cells.expect(loss == wanted, fmt::format("loss {} instead of {}", loss, wanted));
    expect_as_whole(cells, pipe, whole);
  }
}

std::int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

void check_parts(ranks::Cells& cells) {
  cells.cell("each rank keeps its own", [&] {
    nn::Sequential model = layers();
    const auto all = numel_of(layers()->parameters());
    Pipe pipe(model, cells.group(), {.chunks = kChunks});
    const auto mine = numel_of(pipe.parameters());
    cells.expect(numel_of(model->parameters()) == mine, "others' parameters take memory");
    cells.expect(mine > 0 && mine < all, fmt::format("{} of {} parameters", mine, all));
    at::Tensor sum = at::tensor({mine}, at::kLong);
    cells.group()->all_reduce(sum).wait();
    cells.expect(sum.item<std::int64_t>() == all, "a parameter is missing, or there twice");
  });
  cells.cell("files of a model in stages", [&] {
    std::stringstream file;
    torch::save(layers(), file);
    nn::Sequential model = layers();
    Pipe pipe(model, cells.group(), {.chunks = kChunks});
    if (cells.num_ranks() == 1) return;
    const std::string said = "the layers of this rank alone in a model that is in stages on";
    std::ostringstream written;
    cells.expect_usage_error([&] { torch::save(model, written); }, said);
    cells.expect_usage_error([&] { torch::load(model, file); }, said);
    for (const auto& [index, part] : pipe.stages())
      cells.expect_usage_error([&, stage = part] { torch::save(stage, written); }, said);
    // A rank's own file of its own parameters is nobody else's.
    std::stringstream own;
    torch::save(pipe.parameters(), own);
    std::vector<at::Tensor> read;
    torch::load(read, own);
    cells.expect(read.size() == pipe.parameters().size(), "the parameters of this rank");
  });
  cells.cell("balanced by time", [&] {
    nn::Sequential model = layers(), before = layers();
    Pipe pipe(model, cells.group(),
              {.chunks = kChunks, .cut = {.balance = Balance::time, .sample = pipe_input()}});
    at::Tensor cuts = at::tensor(std::vector<std::int64_t>(pipe.cuts().begin(), pipe.cuts().end()));
    const at::Tensor most = cuts.clone();
    cells.group()->all_reduce(most, comm::ReduceOp::max).wait();
    cells.expect_same(cuts, most, "where ranks cut");
    for (const auto& [index, part] : pipe.stages()) {
      for (const auto& item : part->named_buffers())
        cells.expect_same(item.value(), before->named_buffers()[item.key()], item.key());
      for (const at::Tensor& parameter : part->parameters())
        cells.expect(!parameter.grad().defined(), "a measurement left a gradient");
    }
    whole_step(before);
    pipe.forward_backward(pipe_input(), pipe_target(), summed_loss);
    expect_as_whole(cells, pipe, before);
  });
  cells.cell("cut where it is said", [&] {
    Cuts cuts = {0};
    for (int i = 1; i < cells.num_ranks(); ++i) cuts.push_back(i);
    cuts.push_back(14);
    Pipe pipe(layers(), cells.group(), {.chunks = kChunks, .cut = {.cuts = cuts}});
    cells.expect(pipe.cuts() == cuts, "it is cut elsewhere");
    if (cells.rank() == 0)
      cells.expect(pipe.stages().at(0)->named_parameters().contains("first.weight") &&
                       pipe.stages().at(0)->size() == 1,
                   "the first rank has other children");
  });
}

void check_shared_child(ranks::Cells& cells) {
  cells.cell("a child that is there twice", [&] {
    const auto make = [] {
      torch::manual_seed(2);
      nn::Linear shared(6, 6);
      nn::Sequential model;
      model->push_back("first", shared);
      for (int i = 0; i < 6; ++i) model->push_back("tanh" + std::to_string(i), nn::Tanh());
      model->push_back("last", shared);
      return model;
    };
    nn::Sequential whole = make();
    Pipe pipe(make(), cells.group(), {.chunks = kChunks});
    for (int step = 0; step < 2; ++step) {
      whole_step(whole);
      pipe.forward_backward(pipe_input(), pipe_target(), summed_loss);
    }
    for (const auto& [index, part] : pipe.stages())
      for (const auto& item : part->named_parameters())
        cells.expect_close(
            item.value().grad(),
            whole->named_parameters()["first" + item.key().substr(item.key().find('.'))].grad(),
            item.key());
  });
}

void check_pipe_mistakes(ranks::Cells& cells) {
  const auto make = [&](const PipeOptions& options) { Pipe(layers(), cells.group(), options); };
  cells.cell("what a pipe cannot be", [&] {
    cells.expect_usage_error([&] { make({.chunks = 0}); }, "0 micro-batches");
    cells.expect_usage_error(
        [&] {
          make({.chunks = 1, .schedule = ScheduleKind::interleaved, .num_stages_per_rank = 8});
        },
        fmt::format("14 blocks cannot be cut into {} stages", 8 * cells.num_ranks()));
    cells.expect_usage_error([&] { make({.cut = {.cuts = {0, 3}}}); }, "does not cut 14 blocks");
    cells.expect_usage_error([&] { make({.cut = {.balance = Balance::time}}); }, "no sample");
  });
  cells.cell("a pipe of a model that is data parallel already", [&] {
    nn::Sequential model = layers();
    const replicate::DistributedDataParallel parallel(*model, cells.group());
    cells.expect_usage_error(
        [&] { Pipe(model, cells.group(), {}); },
        "split_model() or Pipe was given 'first.weight' of a model that is wrapped already");
  });
  cells.cell("a sample that does not fit", [&] {
    const PipeOptions options = {.cut = {.balance = Balance::time, .sample = at::ones({2, 5})}};
    try {
      make(options);
      cells.expect(false, "nothing was thrown");
    } catch (const UsageError& error) {
      cells.expect(
          cells.rank() != 0 && std::string(error.what()).find("rank 0") != std::string::npos,
          error.what());
    } catch (const c10::Error& error) {
      cells.expect(cells.rank() == 0, "another rank measures");
    }
  });
  cells.cell("a batch that cannot be run, after which the pipe goes on", [&] {
    nn::Sequential whole = layers();
    Pipe pipe(layers(), cells.group(), {.chunks = kChunks});
    const auto run = [&](const at::Tensor& input, const at::Tensor& target) {
      return [&pipe, input, target] { pipe.forward_backward(input, target, summed_loss); };
    };
    cells.expect_usage_error(run(at::ones({3, 6}), pipe_target()),
                             "3 samples of a pipe's input cannot be cut into 4 micro-batches");
    cells.expect_usage_error(run(pipe_input(), {}), "last stage was given no target");
    cells.expect_usage_error(run({}, pipe_target()), "first stage was given no input");
    cells.expect_usage_error(run(at::ones({8, 6}), pipe_target()),
                             "an input of 8 samples and a target of 12");
    whole_step(whole);
    run(pipe_input(), pipe_target())();
    expect_as_whole(cells, pipe, whole);
  });
}

// Without these checks, ranks that disagree would train different models without an error.
void check_ranks_that_disagree(ranks::Cells& cells) {
  const int last = cells.num_ranks() - 1;
  const bool other = cells.rank() == last;
  const auto make = [&](const nn::Sequential& model, const PipeOptions& options) {
    return [&cells, model, options] { Pipe(model, cells.group(), options); };
  };
  const auto cuts_from = [&](int second) {
    Cuts cuts = {0, second};
    while (static_cast<int>(cuts.size()) < cells.num_ranks()) cuts.push_back(cuts.back() + 1);
    cuts.push_back(14);
    return cuts;
  };
  const std::string who = fmt::format("rank {} of", last);
  cells.cell("ranks that disagree", [&] {
    cells.expect_usage_error(make(layers(), {.chunks = other ? 0 : 2}), "0 micro-batches");
    cells.expect_usage_error(make(layers(), {.chunks = other ? 4 : 2}),
                             "4 chunks instead of 2 chunks");
    cells.expect_usage_error(make(layers(), {.cut = {.cuts = cuts_from(other ? 3 : 2)}}),
                             "cut at [0, 3");
    cells.expect_usage_error(make(layers(), {.cut = {.cuts = cuts_from(other ? 3 : 2)}}), who);
    cells.expect_usage_error(
        make(layers(),
             {.schedule = other ? ScheduleKind::one_forward_one_backward : ScheduleKind::gpipe}),
        "the schedule 1f1b instead of the schedule gpipe");
    nn::Sequential longer = layers(), wider(nn::Linear(6, other ? 9 : 8));
    if (other) longer->push_back("more", nn::ReLU());
    cells.expect_usage_error(make(longer, {}), "'more'");
    for (int i = 1; i < cells.num_ranks(); ++i) wider->push_back(nn::ReLU());
    cells.expect_usage_error(make(wider, {}), "'0.weight' (Float of shape [9, 6]) instead of "
                                              "'0.weight' (Float of shape [8, 6])");
    cells.expect_usage_error(
        make(layers(),
             {.cut = {.balance = Balance::time, .sample = other ? at::Tensor() : pipe_input()}}),
        "no sample");
  });
  cells.cell("shared weights of other seeds", [&] {
    torch::manual_seed(cells.rank());
    nn::Linear shared(6, 6);
    const at::Tensor mine = shared->weight.detach().clone();
    nn::Sequential model(shared);
    for (int i = 0; i < 6; ++i) model->push_back(nn::Tanh());
    model->push_back(shared);
    Pipe pipe(model, cells.group(), {.chunks = kChunks});
    at::Tensor first = mine.clone();
    cells.group()->broadcast(first, 0).wait();
    for (const auto& [index, part] : pipe.stages())
      for (const auto& item : part->named_parameters())
        if (item.key().find("weight") != std::string::npos)
          cells.expect_same(item.value(), first, item.key());
  });
}

// Apart from batch norms, a batch in parts has the loss and the gradients of the whole batch.
void check_batches_of_other_sizes(ranks::Cells& cells) {
  const auto make = [] {
    torch::manual_seed(6);
    nn::Sequential model;
    for (int i = 0; i < 8; ++i) {
      model->push_back("in" + std::to_string(i), nn::Linear(6, 6));
      model->push_back("tanh" + std::to_string(i), nn::Tanh());
    }
    return model;
  };
  for (const ScheduleKind kind : schedule_kinds())
    cells.cell(fmt::format("batches of other sizes, {}", name_of(kind)), [&] {
      nn::Sequential whole = make();
      Pipe pipe(make(), cells.group(), {.chunks = kChunks, .schedule = kind});
      for (const int size : {12, 7, 12, 5, 4, 7}) {
        const at::Tensor input = pipe_input().narrow(0, 0, size);
        const at::Tensor target = pipe_target().narrow(0, 0, size);
        double wanted = 0;
        at::Tensor wanted_output, evaluated, trained;
        {
          const torch::NoGradGuard no_grad;
          wanted_output = whole->forward(input);
          wanted = summed_loss(wanted_output, target).item<double>();
        }
        cells.expect(
            std::abs(pipe.evaluate(input, target, summed_loss, &evaluated) / wanted - 1) < 1e-5,
            fmt::format("evaluation of {}", size));
        summed_loss(whole->forward(input), target).backward();
        cells.expect(std::abs(pipe.forward_backward(input, target, summed_loss, &trained) / wanted -
                              1) < 1e-5,
                     fmt::format("loss of {}", size));
        const bool has_last = pipe.stages().contains(pipe.pipeline().schedule().num_stages() - 1);
        for (const at::Tensor& output : {evaluated, trained, pipe.forward(input)}) {
          cells.expect(output.defined() == has_last && !output.requires_grad(),
                       fmt::format("who has the output of {}", size));
          if (has_last)
            cells.expect_close(output, wanted_output, fmt::format("output of {}", size));
        }
        for (const auto& [index, part] : pipe.stages())
          for (const auto& item : part->named_parameters())
            cells.expect_close(item.value().grad(), whole->named_parameters()[item.key()].grad(),
                               fmt::format("{} of {}", item.key(), size));
      }
    });
}

}  // namespace

void check_pipes(ranks::Cells& cells) {
  for (const Checkpoint checkpoint :
       {Checkpoint::never, Checkpoint::except_last, Checkpoint::always})
    for (const ScheduleKind kind : schedule_kinds()) {
      cells.cell(
          fmt::format("pipe, {}, checkpoint {}", name_of(kind), static_cast<int>(checkpoint)), [&] {
            check_pipe(cells, {.chunks = kChunks, .checkpoint = checkpoint, .schedule = kind});
          });
    }
  check_parts(cells);
  check_shared_child(cells);
  check_pipe_mistakes(cells);
  check_ranks_that_disagree(cells);
  check_batches_of_other_sizes(cells);
}

}  // namespace lockstep::pipeline

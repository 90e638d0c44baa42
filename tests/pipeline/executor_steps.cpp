#include <cmath>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>

#include "chain.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

using Tensors = std::vector<at::Tensor>;

// The numbers are whole, so sums are the same in every order.
at::Tensor table() { return at::arange(12, at::kFloat).view({4, 3}).requires_grad_(); }

// The first stage looks up rows of the matrix by which the last one multiplies.
std::vector<Stage> tied_chain(int num_stages, const at::Tensor& first, const at::Tensor& last) {
  std::vector<Stage> chain;
  for (int index = 0; index < num_stages; ++index) {
    const bool is_last = index + 1 == num_stages;
    chain.push_back({[=](int micro_batch, const Tensors& inputs) -> Tensors {
                       const at::Tensor x =
                           index == 0 ? at::embedding(first, at::arange(2) + micro_batch % 2)
                                      : inputs.at(0) * 2;
                       return {is_last ? (x.matmul(last.t()) * (1 + micro_batch)).sum() : x};
                     },
                     is_last      ? Tensors{last}
                     : index == 0 ? Tensors{first}
                                  : Tensors{}});
  }
  return chain;
}

void check_tied(ranks::Cells& cells, const Schedule& schedule) {
  const int stages = schedule.num_stages();
  const at::Tensor mine = table(), whole = table();
  const auto chain = tied_chain(stages, mine, mine);
  const auto twin = tied_chain(stages, whole, whole);
  const bool has_it = schedule.rank_of_stage.front() == cells.rank() ||
                      schedule.rank_of_stage.back() == cells.rank();
  PipelineOptions options;
  options.tied = {{.stages = {0, stages - 1}, .mine = has_it ? mine : at::Tensor()}};
  Pipeline pipeline(schedule, stages_of_rank(chain, schedule, cells.rank()), cells.group(),
                    options);
  // Gradients are added to those of the step before, which have been summed already.
  for (int step = 0; step < 3; ++step) {
    double wanted = 0;
    for (int i = 0; i < schedule.num_micro_batches; ++i) {
      Tensors tensors;
      for (const Stage& stage : twin) tensors = stage.forward(i, tensors);
      wanted += tensors[0].item<double>();
      tensors[0].backward();
    }
    cells.expect(pipeline.run_step() == wanted, "the loss is wrong");
    if (has_it) cells.expect_same(mine.grad(), whole.grad(), fmt::format("step {}", step));
  }
}

void check_large(ranks::Cells& cells, const Schedule& schedule) {
  constexpr std::int64_t kNumbers = 1 << 20;
  const at::Tensor weight = at::ones({kNumbers}).requires_grad_();
  std::map<int, Stage> mine;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] != cells.rank()) continue;
    const bool last = stage + 1 == schedule.num_stages();
    mine[stage] = {[=](int micro_batch, const Tensors& inputs) -> Tensors {
                     const at::Tensor x =
                         inputs.empty() ? at::full({kNumbers}, 1.0 + micro_batch) : inputs[0];
                     return {last ? (x * weight).sum() : x * weight};
                   },
                   {weight}};
  }
  const double num_stages_here = static_cast<double>(mine.size());
  Pipeline pipeline(schedule, std::move(mine), cells.group());
  cells.expect(pipeline.run_step() == 15.0 * kNumbers, "the loss is wrong");
  cells.expect_same(weight.grad(), at::full({kNumbers}, 15 * num_stages_here), "the gradient");
}

// Passes many tensors of different shapes between two stages.
void check_many(ranks::Cells& cells, const Schedule& schedule) {
  constexpr int kTensors = 200;
  const at::Tensor weight = at::ones({1}).requires_grad_();
  std::map<int, Stage> mine;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] != cells.rank()) continue;
    const bool last = stage + 1 == schedule.num_stages();
    mine[stage] = {[=](int micro_batch, const Tensors& inputs) -> Tensors {
                     Tensors given = inputs;
                     if (given.empty())
                       for (int i = 0; i < kTensors; ++i)
                         given.push_back(at::full({1 + i % 7, 1 + i % 3}, 1.0 + micro_batch));
                     for (at::Tensor& tensor : given) tensor = tensor * weight;
                     if (!last) return given;
                     at::Tensor sum = at::zeros({});
                     for (const at::Tensor& tensor : given) sum = sum + tensor.mean();
                     return {sum};
                   },
                   {weight}};
  }
  const double num_stages_here = static_cast<double>(mine.size());
  Pipeline pipeline(schedule, std::move(mine), cells.group());
  for (int step = 1; step <= 2; ++step) {
    const double loss = pipeline.run_step();
    cells.expect(std::abs(loss - 6 * kTensors) < 1e-2, fmt::format("loss {}", loss));
    cells.expect_close(weight.grad(), at::full({1}, step * 6 * kTensors * num_stages_here),
                       "the gradient");
  }
}

// In the first stage's last backward, rank 0 waits for a message that the last rank sends only
// after its step is over.
void check_nobody_waits(ranks::Cells& cells) {
  const int ranks = cells.num_ranks(), last = ranks - 1;
  const Schedule schedule =
      make_schedule(ScheduleKind::gpipe, {.num_ranks = ranks, .num_micro_batches = 3});
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const at::Tensor word = at::zeros({1});
  int passes = 0;
  if (cells.rank() == 0)
    weight.register_hook([&](const at::Tensor&) {
      if (++passes == 3) cells.group()->exchange({comm::receive_from(last, word)}).wait();
    });
  const Stage stage = {[&](int, const Tensors& inputs) -> Tensors {
                         const at::Tensor x = inputs.empty() ? at::ones({2, 2}) : inputs.at(0);
                         const at::Tensor y = x.mm(weight);
                         return {cells.rank() == last ? y.sum() : y};
                       },
                       {weight}};
  Pipeline pipeline(schedule, {{cells.rank(), stage}}, cells.group());
  const double loss = pipeline.run_step();
  if (cells.rank() == last) cells.group()->exchange({comm::send_to(0, word)}).wait();
  cells.expect(loss == 3 * 4 * std::exp2(ranks), fmt::format("loss {}", loss));
}

}  // namespace

void check_steps(ranks::Cells& cells) {
  for (const ScheduleKind kind : schedule_kinds())
    cells.cell(fmt::format("tied parameters, {}", name_of(kind)), [&] {
      check_tied(cells,
                 make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = 5}));
    });
  cells.cell("no rank waits for the others at a step's end", [&] { check_nobody_waits(cells); });
  // The tensors are larger than any buffer between two ranks: sends go on while others are
  // received.
  for (const ScheduleKind kind : schedule_kinds())
    cells.cell(fmt::format("large tensors, {}", name_of(kind)), [&] {
      check_large(cells,
                  make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = 5}));
    });
  for (const ScheduleKind kind : schedule_kinds())
    cells.cell(fmt::format("200 tensors between stages, {}", name_of(kind)), [&] {
      check_many(cells,
                 make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = 3}));
    });
  cells.cell("two pipelines over the same ranks", [&] {
    for (const ScheduleKind kind : {ScheduleKind::gpipe, ScheduleKind::zb_v}) {
      const Schedule schedule =
          make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = 3});
      const auto chain = make_chain(ChainKind::mlp, schedule.num_stages());
      const auto mine = stages_of_rank(chain, schedule, cells.rank());
      Pipeline one(schedule, mine, cells.group()), two(schedule, mine, cells.group());
      const double loss = one.evaluate();
      cells.expect(two.run_step() == loss && one.run_step() == loss, "they disturb each other");
    }
  });
}

}  // namespace lockstep::pipeline

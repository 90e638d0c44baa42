#include <functional>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>

#include "chain.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

using Tensors = std::vector<at::Tensor>;

// The rank with the failing stage throws the error that contains `part`; all others throw a
// CommError that contains it, too. No rank waits, and the caller's group and a new pipeline over it
// still work.
void expect_end(ranks::Cells& cells, const Schedule& schedule, std::vector<Stage> chain, int stage,
                const std::string& part) {
  const int where = schedule.rank_of_stage[static_cast<std::size_t>(stage)];
  Pipeline pipeline(schedule, stages_of_rank(chain, schedule, cells.rank()), cells.group());
  try {
    pipeline.run_step();
    cells.expect(false, "nothing was thrown");
  } catch (const CommError& error) {
    cells.expect(cells.rank() != where, "the rank where it happened blames another");
    const std::string text = error.what();
    cells.expect(text.find(part) != std::string::npos, "the error says: " + text);
    cells.expect(text.find(fmt::format("rank {} says", where)) != std::string::npos,
                 "the error does not say where: " + text);
  } catch (const std::exception& error) {
    cells.expect(cells.rank() == where,
                 fmt::format("another error than CommError: {}", error.what()));
    cells.expect(std::string(error.what()).find(part) != std::string::npos,
                 fmt::format("the error says: {}", error.what()));
  }
  cells.expect_usage_error([&] { pipeline.run_step(); }, part);
  cells.expect_usage_error([&] { pipeline.evaluate(); }, "Make another");
  cells.group()->barrier().wait();
  const auto good = make_chain(ChainKind::mlp, schedule.num_stages());
  Pipeline another(schedule, stages_of_rank(good, schedule, cells.rank()), cells.group());
  cells.expect(another.run_step() == another.evaluate(), "the next pipeline is not right");
}

using Forward = decltype(Stage::forward);

void check_stage_that(ranks::Cells& cells, const std::string& what, int stage, const Forward& does,
                      const std::string& part) {
  for (const ScheduleKind kind :
       {ScheduleKind::gpipe, ScheduleKind::one_forward_one_backward, ScheduleKind::zb_v}) {
    const Schedule schedule =
        make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = 4});
    const int index = stage < 0 ? schedule.num_stages() + stage : stage;
    cells.cell(fmt::format("stage {} {}, {}", index, what, schedule.name), [&] {
      auto chain = make_chain(ChainKind::mlp, schedule.num_stages());
      Stage& chosen = chain[static_cast<std::size_t>(index)];
      chosen.forward = [does, forward = chosen.forward](int micro_batch, const Tensors& inputs) {
        return micro_batch < 2 ? forward(micro_batch, inputs) : does(micro_batch, inputs);
      };
      expect_end(cells, schedule, std::move(chain), index, part);
    });
  }
}

}  // namespace

void check_failures(ranks::Cells& cells) {
  for (const int stage : {0, 1, -1})
    check_stage_that(
        cells, "throws", stage,
        [](int, const Tensors&) -> Tensors { throw std::runtime_error("the disk is full"); },
        "the disk is full");
  check_stage_that(
      cells, "throws going back", -1,
      [](int, const Tensors& inputs) -> Tensors {
        at::Tensor loss = inputs.at(0).sum();
        loss.register_hook([](const at::Tensor&) { throw std::runtime_error("no way back"); });
        return {loss};
      },
      "no way back");
  check_stage_that(
      cells, "has another shape", 0,
      [](int, const Tensors&) -> Tensors {
        return {at::ones({1, 6})};
      },
      "micro-batches must be of one shape");
  check_stage_that(
      cells, "has another type", 0,
      [](int, const Tensors&) -> Tensors {
        return {at::ones({3, 6}, at::kDouble)};
      },
      "Double [3, 6]");
  check_stage_that(
      cells, "returns no number", -1, [](int, const Tensors& in) -> Tensors { return in; },
      "it must be one number");
  check_stage_that(
      cells, "returns nothing", -1, [](int, const Tensors&) -> Tensors { return {}; },
      "returned nothing: it must be one number");
  check_stage_that(
      cells, "returns what is not defined", 0,
      [](int, const Tensors&) -> Tensors { return {at::Tensor()}; }, "not defined");
}

void check_mistakes(ranks::Cells& cells) {
  const int ranks = cells.num_ranks();
  const Schedule schedule = make_schedule(ScheduleKind::one_forward_one_backward,
                                          {.num_ranks = ranks, .num_micro_batches = 3});
  const auto chain = make_chain(ChainKind::mlp, ranks);
  const auto mine = stages_of_rank(chain, schedule, cells.rank());
  const auto make = [&](const Schedule& of, std::map<int, Stage> stages,
                        PipelineOptions options = {}) {
    Pipeline(of, std::move(stages), cells.group(), std::move(options)).run_step();
  };
  // Expects an error when one rank is given something else than the others.
  const auto expect_refusal = [&](const std::function<void()>& body, const std::string& part) {
    cells.expect_usage_error(body, cells.rank() == 1 ? part : "rank 1 of the pipeline");
  };
  cells.cell("a schedule for other ranks", [&] {
    const auto other =
        make_schedule(ScheduleKind::gpipe, {.num_ranks = ranks + 1, .num_micro_batches = 3});
    cells.expect_usage_error([&] { make(other, mine); }, fmt::format("is for {} ranks", ranks + 1));
  });
  cells.cell("a schedule that cannot be run", [&] {
    auto broken = schedule;
    broken.actions[1].pop_back();
    cells.expect_usage_error([&] { make(broken, mine); }, "");
  });
  cells.cell("different schedules", [&] {
    const auto other =
        make_schedule(ScheduleKind::gpipe, {.num_ranks = ranks, .num_micro_batches = 3});
    cells.expect_usage_error([&] { make(cells.rank() == 1 ? other : schedule, mine); },
                             "ranks 0 and 1 of the pipeline");
  });
  cells.cell("a stage is missing", [&] {
    expect_refusal([&] { make(schedule, cells.rank() == 1 ? std::map<int, Stage>{} : mine); },
                   "has the stages [1] on rank 1 of the pipeline, which was given []");
  });
  cells.cell("a stage of another rank", [&] {
    auto more = mine;
    if (cells.rank() == 1) more[0] = chain[0];
    expect_refusal([&] { make(schedule, more); }, "was given [0, 1]");
  });
  cells.cell("a stage without a forward", [&] {
    auto none = mine;
    if (cells.rank() == 1) none[1].forward = nullptr;
    expect_refusal([&] { make(schedule, none); }, "stage 1 of the pipeline has no forward");
  });
  cells.cell("a tied parameter that is not given", [&] {
    PipelineOptions options;
    options.tied = {{.stages = {0, 1}, .mine = cells.rank() == 0 ? at::ones({2}) : at::Tensor()}};
    expect_refusal([&] { make(schedule, mine, options); }, "did not say which it is");
  });
  cells.cell("a tied parameter of no stage", [&] {
    PipelineOptions options;
    options.tied = {{.stages = {0, ranks}, .mine = at::ones({2})}};
    cells.expect_usage_error([&] { make(schedule, mine, options); },
                             fmt::format("that of stage {}", ranks));
  });
  cells.cell("calls at the wrong time", [&] {
    Pipeline pipeline(schedule, mine, cells.group());
    cells.expect_usage_error([&] { pipeline.timeline(); }, "before the first step");
    cells.expect_usage_error([&] { pipeline.expect_kinds({1}); },
                             "1 kinds of micro-batches for the schedule");
    pipeline.evaluate();
    cells.expect_usage_error([&] { pipeline.timeline(); }, "before the first step");
    {
      const c10::NoGradGuard no_grad;
      cells.expect_usage_error([&] { pipeline.run_step(); }, "evaluate() is for that");
    }
    cells.expect(pipeline.run_step() == pipeline.evaluate(), "it did not go on");
  });
}

}  // namespace lockstep::pipeline

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>

#include "chain.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

void expect_gradients(ranks::Cells& cells, const std::map<int, Stage>& mine,
                      const ChainResult& wanted, const std::string& when) {
  for (const auto& [index, stage] : mine)
    for (std::size_t i = 0; i < stage.parameters.size(); ++i) {
      const at::Tensor& parameter = stage.parameters[i];
      at::Tensor right = wanted.gradients[static_cast<std::size_t>(index)][i];
      // A tensor that the next stage does not use has no gradient in one process, and zeros here.
      if (!right.defined() && parameter.grad().defined()) right = at::zeros_like(parameter);
      cells.expect_same(parameter.grad(), right,
                        fmt::format("{} gradient {} of stage {}", when, i, index));
    }
}

void expect_timeline(ranks::Cells& cells, const Schedule& schedule, const Timeline& timeline) {
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    std::vector<Action> computed;
    for (const Action& action : schedule.actions[rank])
      if (!is_transfer(action.kind)) computed.push_back(action);
    double before = 0;
    std::size_t next = 0;
    for (const Span& span : timeline.ranks.at(rank)) {
      cells.expect(span.action == computed.at(next++), "the timeline has another action");
      cells.expect(span.start >= before && span.end >= span.start, "times go back");
      before = span.end;
    }
    cells.expect(next == computed.size(), "the timeline misses an action");
  }
  cells.expect(!draw_text(timeline).empty(), "nothing is drawn");
  cells.expect(draw_svg(timeline).find("<svg") != std::string::npos, "no picture");
}

void check_one(ranks::Cells& cells, ChainKind chain_kind, const Schedule& schedule) {
  const auto chain = make_chain(chain_kind, schedule.num_stages());
  const auto twin = make_chain(chain_kind, schedule.num_stages());
  const auto mine = stages_of_rank(chain, schedule, cells.rank());
  Pipeline pipeline(schedule, mine, cells.group());
  ChainResult wanted;
  for (const char* step : {"first step:", "second step:"}) {
    run_whole(twin, schedule, wanted);
    const double before = pipeline.evaluate();
    const double loss = pipeline.run_step();
    cells.expect(loss == wanted.loss,
                 fmt::format("{} loss {} instead of {}", step, loss, wanted.loss));
    const auto live = live_forwards(schedule)[static_cast<std::size_t>(cells.rank())];
    const double after = pipeline.evaluate();
    // LibTorch may use other kernels if no gradient is wanted.
    const double rounding = 1e-5 * std::abs(loss);
    cells.expect(before == after && std::abs(after - loss) <= rounding,
                 fmt::format("{} {} and {} without gradients, {} with", step, before, after, loss));
    cells.expect(pipeline.most_live() == live.until_weight,
                 fmt::format("{} {} forwards were live, and the schedule has {}", step,
                             pipeline.most_live(), live.until_weight));
    expect_gradients(cells, mine, wanted, step);
    expect_timeline(cells, schedule, pipeline.timeline());
  }
}

}  // namespace

void check_schedules(ranks::Cells& cells) {
  const int ranks = cells.num_ranks();
  for (const ChainKind chain : kChainKinds) {
    // With more ranks only the chains that differ most from each other run, because the others
    // would take too long.
    if (ranks > 2 && (chain == ChainKind::mlp || chain == ChainKind::frozen)) continue;
    for (const ScheduleKind kind : schedule_kinds())
      for (const int micro_batches : {ranks - 1, ranks, 2 * ranks + 1}) {
        const Schedule schedule =
            make_schedule(kind, {.num_ranks = ranks, .num_micro_batches = micro_batches});
        cells.cell(
            fmt::format("{}, {}, {} micro-batches", name_of(chain), schedule.name, micro_batches),
            [&] { check_one(cells, chain, schedule); });
      }
  }
  cells.cell("three chunks a rank", [&] {
    check_one(cells, ChainKind::mixed,
              make_schedule(ScheduleKind::interleaved,
                            {.num_ranks = ranks, .num_micro_batches = 5, .num_chunks = 3}));
  });
}

}  // namespace lockstep::pipeline

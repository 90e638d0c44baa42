#include <ATen/ATen.h>

#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>

#include "chain.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

constexpr const char* kNotAligned = "not aligned";

Timeline measured(ranks::Cells& cells) {
  const Schedule schedule = make_schedule(ScheduleKind::one_forward_one_backward,
                                          {.num_ranks = cells.num_ranks(), .num_micro_batches = 3});
  const auto chain = make_chain(ChainKind::mlp, schedule.num_stages());
  Pipeline pipeline(schedule, stages_of_rank(chain, schedule, cells.rank()), cells.group());
  pipeline.run_step();
  return pipeline.timeline();
}

// How many of the text and the picture say it.
int num_saying_not_aligned(const Timeline& timeline) {
  const bool in_text = draw_text(timeline).find(kNotAligned) != std::string::npos;
  const bool in_picture = draw_svg(timeline).find(kNotAligned) != std::string::npos;
  return static_cast<int>(in_text) + static_cast<int>(in_picture);
}

}  // namespace

void check_clocks_of_one_host(ranks::Cells& cells) {
  cells.cell("one host", [&] {
    const Timeline timeline = measured(cells);
    cells.expect(timeline.one_clock, "its clock is not taken for one");
    cells.expect(num_saying_not_aligned(timeline) == 0,
                 "the picture says that ranks are not aligned");
    cells.expect(timeline.start() == 0, "it does not begin with 0");
    // A stage can begin only when the one before it is done.
    for (std::size_t rank = 1; rank < timeline.ranks.size(); ++rank) {
      const double before = timeline.ranks[rank - 1].front().end;
      cells.expect(timeline.ranks[rank].front().start >= before,
                   fmt::format("rank {} begins before its input is there", rank));
    }
  });
}

void check_clocks_of_several_hosts(ranks::Cells& cells) {
  cells.cell("several hosts", [&] {
    const Timeline timeline = measured(cells);
    cells.expect(!timeline.one_clock, "their clocks are taken for one");
    cells.expect(num_saying_not_aligned(timeline) == 2, "the picture or the text does not say it");
    for (const auto& spans : timeline.ranks)
      cells.expect(spans.front().start == 0, "a rank is not from its own start");
  });
}

}  // namespace lockstep::pipeline

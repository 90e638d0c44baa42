// Measures how long the ranks of a pipeline are idle, for each schedule, and prints the formula's
// and the simulator's values beside it. Stages sleep for the time that their forward and the halves
// of their backward would take, so that ranks need no core of their own; the executor, autograd and
// the transfers are the real ones.
//
//   lockstep run --standalone --nproc-per-node 4 build/release/bench/pipeline_idle
//       [milliseconds [steps [micro-batches]]]
//
// A rank's part of the model takes the given milliseconds (60) for its forward, for its input's
// gradient and for its weights' gradient, each, however many stages the part has. The result is the
// median of the steps (5); by default there are twice as many micro-batches as ranks. All values
// are percentages: of the step's makespan; then of a rank's time from its own first action to its
// last; and of the time between the ends of two steps of the first rank, when steps follow each
// other.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <lockstep/comm/world/join.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

namespace {

using namespace lockstep;
using namespace lockstep::pipeline;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::duration<double, std::milli>;

struct Setting {
  double milliseconds = 60;  // of a rank's part in forward, and in each half of backward
  int steps = 5;
  int micro_batches = 0;
};

// A product, whose backward a schedule can split into halves. A hook of its input's gradient sleeps
// in the first half, and one of its weight's in the second.
Stage sleeping_stage(bool first, bool last, Milliseconds time) {
  const at::Tensor weight = at::ones({1, 1}).requires_grad_();
  weight.register_hook([time](const at::Tensor&) { std::this_thread::sleep_for(time); });
  return {[=](int, const Tensors& inputs) -> Tensors {
            const at::Tensor given = first ? at::ones({1, 1}).requires_grad_() : inputs.at(0);
            at::Tensor x = given * 1;
            if (x.requires_grad())
              x.register_hook([time](const at::Tensor&) { std::this_thread::sleep_for(time); });
            std::this_thread::sleep_for(time);
            const at::Tensor y = x.mm(weight);
            return {last ? y.sum() : y};
          },
          {weight}};
}

// The formula of docs/pipeline.md, with F = B = W = 1.
double formula(ScheduleKind kind, int ranks, int micro_batches, int chunks) {
  double idle = 3.0 * (ranks - 1);
  if (kind == ScheduleKind::interleaved) idle /= chunks;
  if (kind == ScheduleKind::zb_h1) idle = ranks - 1;
  if (kind == ScheduleKind::zb_v) idle = 0.5 * (ranks - 1);
  return idle / (3.0 * micro_batches + idle);
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void measure(const std::shared_ptr<comm::Communicator>& world, ScheduleKind kind,
             const Setting& setting) {
  const int ranks = world->size();
  const Schedule schedule =
      make_schedule(kind, {.num_ranks = ranks, .num_micro_batches = setting.micro_batches});
  const int chunks = schedule.num_stages() / ranks;
  std::map<int, Stage> stages;
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == world->rank())
      stages[stage] = sleeping_stage(stage == 0, stage + 1 == schedule.num_stages(),
                                     Milliseconds(setting.milliseconds / chunks));
  Pipeline pipeline(schedule, std::move(stages), world);
  pipeline.run_step();
  std::vector<double> all, own;
  for (int i = 0; i < setting.steps; ++i) {
    world->barrier().wait();
    pipeline.run_step();
    const Timeline timeline = pipeline.timeline();
    all.push_back(100 * bubble(timeline));
    own.push_back(100 * bubble_between_own_ends(timeline));
  }
  // The times from the end of this rank's work in one step to its end in the next.
  std::vector<double> in_a_row;
  const double busy = 3 * setting.milliseconds * setting.micro_batches;
  auto end = std::chrono::steady_clock::now();
  for (int i = 0; i <= setting.steps; ++i) {
    pipeline.run_step();
    const auto before = std::exchange(end, std::chrono::steady_clock::now());
    if (i > 0) in_a_row.push_back(100 * (1 - busy / Milliseconds(end - before).count()));
  }
  if (world->rank() != 0) return;
  const Timeline planned = simulate(schedule);
  const double simulated = 100 * bubble(planned);
  std::printf("| %s | %d | %d | %d | %.1f | %.1f | %.1f | %+.1f | %.1f | %.1f | %.1f |\n",
              schedule.name.c_str(), ranks, setting.micro_batches, chunks,
              100 * formula(kind, ranks, setting.micro_batches, chunks), simulated, median(all),
              median(all) - simulated, 100 * bubble_between_own_ends(planned), median(own),
              median(in_a_row));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const auto world = comm::join_world();
  Setting setting;
  if (argc > 1) setting.milliseconds = std::atof(argv[1]);
  if (argc > 2) setting.steps = std::max(1, std::atoi(argv[2]));
  setting.micro_batches = argc > 3 ? std::atoi(argv[3]) : 2 * world->size();
  if (world->rank() == 0)
    std::printf(
        "| schedule | ranks | micro-batches | stages a rank | formula | simulated | "
        "measured | more than simulated | simulated, own ends | measured, own ends | in a row |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const ScheduleKind kind : schedule_kinds()) measure(world, kind, setting);
}

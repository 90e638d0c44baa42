#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

at::Tensor loss_of(Chain& model) { return model->forward(at::ones({2, 5})).pow(2).mean(); }

// The number of gathers in each of several steps.
std::vector<std::int64_t> gathers_per_step(const Cells& cells, int num_layers,
                                           std::size_t max_live) {
  Chain model(num_layers);
  FullyShardedDataParallel parallel = sharded(cells, *model, {.max_live_units = max_live});
  const auto optimizer = adamw(parallel, *model);
  std::vector<std::int64_t> all;
  for (int step = 0; step < 5; ++step) {
    const std::int64_t before = parallel.gatherer().num_gathers();
    optimizer->zero_grad();
    loss_of(model).backward();
    optimizer->step(0.01);
    all.push_back(parallel.gatherer().num_gathers() - before);
  }
  return all;
}

}  // namespace

void check_gathers(Cells& cells) {
  cells.cell("a chain's units come once on the way there and once on the way back", [&] {
    for (const int layers : {2, 3, 6})
      for (const std::size_t max_live : {1u, 2u, 3u}) {
        const auto gathers = gathers_per_step(cells, layers, max_live);
        // The unit at the turning point is there already, and so are those within the limit, except
        // for the one that makes room for the next.
        const std::int64_t most = 2 * layers - 1;
        for (std::size_t step = 2; step < gathers.size(); ++step)
          cells.expect(gathers[step] <= most && gathers[step] >= layers,
                       fmt::format("{} layers, {} live: step {} took {} gathers, {} are enough",
                                   layers, max_live, step, gathers[step], most));
        cells.expect(gathers[3] == gathers[4], "steps differ");
      }
  });
  cells.cell("with room for all of them each comes once a step", [&] {
    const auto gathers = gathers_per_step(cells, 4, 4);
    cells.expect(gathers[3] == 4, fmt::format("{} gathers", gathers[3]));
  });
  cells.cell("more room spares gathers", [&] {
    std::int64_t before = 1000;
    for (const std::size_t max_live : {1u, 3u, 6u}) {
      const std::int64_t now = gathers_per_step(cells, 6, max_live)[3];
      cells.expect(now < before, fmt::format("{} with {} live, {} before", now, max_live, before));
      before = now;
    }
  });
  cells.cell("from the second step on the next unit is on its way while one computes", [&] {
    Chain model(4);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    const auto optimizer = adamw(parallel, *model);
    std::vector<std::int64_t> first;
    std::int64_t before = 0;
    for (int step = 0; step < 4; ++step) {
      std::vector<std::int64_t> seen;  // gathers since the last backward ended
      const auto look = [&] { seen.push_back(parallel.gatherer().num_gathers() - before); };
      look();
      at::Tensor hidden = at::ones({2, 5});
      for (std::size_t layer = 0; layer < 3; ++layer) {
        hidden = model->layer(layer).forward(hidden);
        look();
        // The layers behind this one have computed their gradients by then.
        if (layer < 2) hidden.register_hook([&](const at::Tensor&) { look(); });
      }
      model->layer(3).forward(hidden).pow(2).mean().backward();
      before = parallel.gatherer().num_gathers();
      optimizer->step(0.01);
      optimizer->zero_grad();
      if (step == 0) first = seen;
      if (step < 2) continue;  // the second step learns that a step's end starts the next
      for (std::size_t look_number = 0; look_number < seen.size(); ++look_number) {
        // One gather more than in the first step has begun at each look but the last, whose next
        // unit is the first of the next step.
        const bool last = look_number + 1 == seen.size();
        cells.expect(seen[look_number] == first[look_number] + (last ? 0 : 1),
                     fmt::format("step {}, look {}: {} gathers have begun, {} in the first step",
                                 step, look_number, seen[look_number], first[look_number]));
      }
    }
  });
}

}  // namespace lockstep::shard

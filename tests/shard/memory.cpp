#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/device/live_bytes.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

constexpr int kLayers = 8;
constexpr std::int64_t kWidth = 360;  // a million parameters

at::Tensor loss_of(Chain& model) { return model->forward(at::ones({1, kWidth})).pow(2).mean(); }

double num_parameters(const Chain& model) {
  double sum = 0;
  for (const at::Tensor& parameter : model->parameters())
    sum += static_cast<double>(parameter.numel());
  return sum;
}

void expect_about(Cells& cells, std::int64_t got, double wanted) {
  cells.expect(std::abs(static_cast<double>(got) - wanted) <= 0.02 * wanted,
               fmt::format("{} bytes at rest, the formula has {:.0f}", got, wanted));
}

void expect_no_growth(Cells& cells, const MemoryReport& early, const MemoryReport& late) {
  const auto same = [&](std::int64_t before, std::int64_t after, const std::string& what) {
    cells.expect(after <= before, fmt::format("{} grew from {} to {} bytes", what, before, after));
  };
  same(early.parameters, late.parameters, "parameters");
  same(early.gradients, late.gradients, "gradients");
  same(early.optimizer, late.optimizer, "optimizer state");
  same(early.buffers, late.buffers, "buffers");
  same(early.gathered_now, late.gathered_now, "what is gathered");
  same(early.gathered_peak, late.gathered_peak, "the peak of what is gathered");
  same(early.gradients_on_their_way_peak, late.gradients_on_their_way_peak,
       "the peak of gradients on their way");
}

std::uint64_t sent_by(const comm::Communicator& group) {
  const auto to_ranks = group.sent_bytes();
  std::uint64_t total = 0;
  for (const std::uint64_t bytes : *to_ranks) total += bytes;
  return total;
}

// What a step of several passes holds between them, and what it sends to sum them.
void check_memory_between_passes(Cells& cells) {
  struct Step {
    double held = 0;  // bytes more between the passes than before them
    std::uint64_t sent = 0;
  };
  const auto second_step = [&](Cut cut, bool each_pass, int num_passes) {
    Chain model(kLayers, kWidth);
    const Groups groups = shard_over(cells.group());
    FullyShardedDataParallel parallel(*model, groups, {.cut = cut});
    parallel.exchange_each_pass(each_pass);
    const auto optimizer = adamw(parallel, *model);
    Step result;
    for (int step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      const device::LiveBytes live(at::kCPU);
      result = {.sent = sent_by(*groups.reduce)};
      for (int pass = 0; pass < num_passes; ++pass) {
        std::optional<data_parallel::Accumulation> more;
        if (pass + 1 < num_passes) more.emplace(parallel.accumulate());
        parallel.backward(loss_of(model), 1);
        if (pass + 1 < num_passes)
          result.held = std::max(result.held, static_cast<double>(live.now()));
      }
      result.sent = sent_by(*groups.reduce) - result.sent;
      optimizer->step(0.001);
    }
    return result;
  };
  for (const auto& [name, cut] : {std::pair("SHARD_GRAD_OP", Cut::gradients),
                                  std::pair("FULL_SHARD", Cut::gradients_and_parameters)})
    cells.cell(fmt::format("{} between the passes of a step", name), [&, cut = cut] {
      const double gradients = 4 * num_parameters(Chain(kLayers, kWidth));
      const Step one = second_step(cut, true, 1);
      const Step into_shards = second_step(cut, true, 3);
      const Step whole = second_step(cut, false, 3);
      cells.expect(into_shards.held < 0.02 * gradients,
                   fmt::format("{} bytes were held beside the shards", into_shards.held));
      cells.expect(whole.held >= gradients,
                   fmt::format("{} bytes are less than whole gradients", whole.held));
      // Calls whose sums are divided on the way say by what, which is all that differs.
      const auto is_about = [&](std::uint64_t got, std::uint64_t wanted) {
        return std::abs(static_cast<double>(got) - static_cast<double>(wanted)) <=
               1e-4 * static_cast<double>(wanted);
      };
      cells.expect(one.sent > 0 && is_about(into_shards.sent, 3 * one.sent) &&
                       is_about(whole.sent, one.sent),
                   fmt::format("{} bytes were sent for three passes into shards, {} for three that "
                               "add up on the rank and {} for one",
                               into_shards.sent, whole.sent, one.sent));
    });
}

}  // namespace

void check_memory(Cells& cells) {
  const double ranks = cells.num_ranks();
  struct Way {
    std::string name;
    Cut cut;
    std::size_t max_live;
    int num_steps;
  };
  for (const auto& [name, cut, max_live, num_steps] :
       std::vector<Way>{{"FULL_SHARD, one unit at a time", Cut::gradients_and_parameters, 1, 6},
                        {"FULL_SHARD, two units at a time", Cut::gradients_and_parameters, 2, 50},
                        {"FULL_SHARD, three units at a time", Cut::gradients_and_parameters, 3, 6},
                        {"SHARD_GRAD_OP", Cut::gradients, 2, 20}})
    cells.cell("memory of " + name, [&] {
      Chain model(kLayers, kWidth);
      FullyShardedDataParallel parallel(*model, shard_over(cells.group()),
                                        {.cut = cut, .max_live_units = max_live});
      const auto optimizer = adamw(parallel, *model);
      MemoryReport early;
      for (int step = 0; step < num_steps; ++step) {
        loss_of(model).backward();
        optimizer->step(0.001);
        if (step == 2) early = parallel.memory_report();
        optimizer->zero_grad();
        // An evaluation now and then leaves nothing behind once a step has followed it.
        const c10::NoGradGuard no_grad;
        if (step % 20 == 10) loss_of(model);
      }
      loss_of(model).backward();
      optimizer->step(0.001);
      const MemoryReport late = parallel.memory_report();
      expect_no_growth(cells, early, late);
      const double psi = num_parameters(model);
      cells.expect(late.num_parameters == static_cast<std::int64_t>(psi), "the parameters' number");
      cells.expect(late.num_ranks == cells.num_ranks(), "the ranks' number");
      const bool whole = cut == Cut::gradients;
      expect_about(cells, late.at_rest(), whole ? 4 * psi + 12 * psi / ranks : 16 * psi / ranks);
      std::int64_t unit = 0;
      for (const auto& one : parallel.units()) unit = std::max(unit, one->gathered_bytes());
      cells.expect(late.gathered_peak <= static_cast<std::int64_t>(max_live) * unit,
                   fmt::format("{} bytes were gathered at once, {} units", late.gathered_peak,
                               static_cast<double>(late.gathered_peak) / unit));
      if (!whole) {
        cells.expect(late.gathered_peak >= unit, "nothing was ever gathered");
        cells.expect(
            parallel.gatherer().peak_live_units() <= max_live,
            fmt::format("{} units were there at once", parallel.gatherer().peak_live_units()));
      }
      // A step's end begins to gather the first unit of the next step.
      cells.expect(late.gathered_now <= unit,
                   fmt::format("{} bytes are gathered at rest", late.gathered_now));
      cells.expect(!late.text().empty(), "no text");
    });
  check_memory_between_passes(cells);
  cells.cell("nothing is gathered before the first step and after a state was written", [&] {
    Chain model(kLayers, kWidth);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    cells.expect(parallel.memory_report().gathered_now == 0, "before the first step");
    parallel.full_state_dict();
    cells.expect(parallel.memory_report().gathered_now == 0, "after full_state_dict()");
    loss_of(model).backward();
    cells.expect(parallel.memory_report().gathered_now == 0, "after a backward");
  });
  cells.cell("what was held beyond the limit goes", [&] {
    Chain model(kLayers, kWidth);
    FullyShardedDataParallel parallel = sharded(cells, *model);
    const std::int64_t unit = parallel.units().front()->gathered_bytes();
    {
      const auto whole = parallel.full_parameters();
      cells.expect(parallel.memory_report().gathered_now == kLayers * unit, "not all were there");
    }
    cells.expect(parallel.memory_report().gathered_now <= 2 * unit, "after full_parameters()");
    std::vector<at::Tensor> biases;
    for (std::size_t layer = 0; layer < kLayers; ++layer)
      biases.push_back(model->layer(layer).bias);
    at::cat(biases);
    cells.expect(parallel.memory_report().gathered_now <= 2 * unit, "after one operator on all");
  });
  cells.cell("what the parameters lay in before is freed", [&] {
    Chain model(2, kWidth);
    const c10::weak_intrusive_ptr<c10::StorageImpl> before(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            model->layer(0).weight.storage().unsafeGetStorageImpl()));
    FullyShardedDataParallel parallel = sharded(cells, *model);
    cells.expect(before.expired(), "it is still there");
  });
  cells.cell("memory of ZeRO-1", [&] {
    Chain model(kLayers, kWidth);
    replicate::DistributedDataParallel replicas(
        *model, cells.group(), {}, {}, std::make_unique<OptimizerShards>(*model, cells.group()));
    const auto optimizer = replicas.make_optimizer(
        optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
    MemoryReport early;
    for (int step = 0; step < 10; ++step) {
      loss_of(model).backward();
      optimizer->step(0.001);
      if (step == 2) early = replicas.memory_report();
      if (step < 9) optimizer->zero_grad();
    }
    const MemoryReport late = replicas.memory_report();
    expect_no_growth(cells, early, late);
    const double psi = num_parameters(model);
    expect_about(cells, late.at_rest(), 8 * psi + 8 * psi / ranks);
  });
}

}  // namespace lockstep::shard

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <lockstep/optim/clip.h>
#include <lockstep/optim/grad_scaler.h>
#include <tests/ranks/no_waiting.h>

#include "chain.h"
#include "tables.h"

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
#include <c10/core/CachingDeviceAllocator.h>
#define LOCKSTEP_COUNTS_DEVICE_MEMORY
#endif
#if defined(LOCKSTEP_HAVE_CUDA)
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace lockstep::shard {

namespace {

using ranks::Cells;

// All ranks use the same GPU, because there may be only one.
const c10::Device kGpu(at::kCUDA, 0);

constexpr std::int64_t kGpuWidth = 64;

struct GpuTraining {
  Chain model;
  FullyShardedDataParallel parallel;
  std::unique_ptr<optim::Optimizer> optimizer;

  GpuTraining(Cells& cells, const Options& options)
      : model(on_gpu()),
        parallel(*model, shard_over(cells.group()), scrubbed(options)),
        optimizer(adamw(parallel, *model)) {}

  static Chain on_gpu() {
    torch::manual_seed(11);
    Chain model(4, kGpuWidth);
    model->to(kGpu);
    return model;
  }

  static at::Tensor input(const Cells& cells, int step) {
    torch::manual_seed(static_cast<std::uint64_t>(500 * step + cells.rank()));
    return at::randn({8, kGpuWidth}).to(kGpu);
  }
  at::Tensor loss(const at::Tensor& input) {
    return model->forward(input).to(at::kFloat).pow(2).mean();
  }
  at::Tensor loss(const Cells& cells, int step) { return loss(input(cells, step)); }
};

const MixedPrecision kGpuBf16 = {.param_dtype = at::kBFloat16};

void check_parity_in_16_bits(Cells& cells) {
  const std::vector<std::pair<std::string, Options>> ways = {
      {"FULL_SHARD", {.mixed_precision = kGpuBf16}},
      {"FULL_SHARD, optimizer offloaded",
       {.mixed_precision = kGpuBf16, .cpu_offload = {.offload_optimizer = true}}},
      {"FULL_SHARD, all offloaded",
       {.mixed_precision = kGpuBf16,
        .cpu_offload = {.offload_optimizer = true, .offload_params = true}}},
      {"SHARD_GRAD_OP, optimizer offloaded",
       {.cut = Cut::gradients,
        .mixed_precision = kGpuBf16,
        .cpu_offload = {.offload_optimizer = true}}}};
  for (const auto& [name, options] : ways)
    cells.cell("in bf16 as SHARD_GRAD_OP: " + name, [&] {
      GpuTraining got(cells, options);
      GpuTraining wanted(cells, {.cut = Cut::gradients, .mixed_precision = kGpuBf16});
      const bool on_host = options.cpu_offload.offload_optimizer;
      cells.expect(got.parallel.units().front()->part().is_cpu() == on_host,
                   "the part is on the wrong device");
      for (int step = 0; step < 5; ++step) {
        got.optimizer->zero_grad();
        wanted.optimizer->zero_grad();
        const at::Tensor loss = got.loss(cells, step);
        const at::Tensor other = wanted.loss(cells, step);
        cells.expect_close(loss.detach().cpu(), other.detach().cpu(),
                           fmt::format("step {}: the loss", step));
        loss.backward();
        other.backward();
        const auto mine = got.parallel.clip_gradients(0.5);
        const auto theirs = wanted.parallel.clip_gradients(0.5);
        cells.expect(
            std::abs(mine.norm - theirs.norm) < 1e-3 * theirs.norm,
            fmt::format("step {}: the norm is {} against {}", step, mine.norm, theirs.norm));
        got.optimizer->step(0.01);
        wanted.optimizer->step(0.01);
      }
      const auto weights = got.parallel.full_state_dict({.rank0_only = false});
      const auto others = wanted.parallel.full_state_dict({.rank0_only = false});
      for (std::size_t i = 0; i < weights.size(); ++i)
        cells.expect((weights[i].tensor - others[i].tensor).abs().max().item<double>() < 2e-3,
                     fmt::format("{} is far off", weights[i].name));
    });
}

void check_scaled(Cells& cells) {
  cells.cell("fp16 with a scale that is too large at first", [&] {
    GpuTraining it(cells, {.mixed_precision = {.param_dtype = at::kHalf}});
    optim::GradScaler scaler({.initial_scale_power = 24, .hysteresis = 1});
    int steps = 0;
    double first = 0;
    double last = 0;
    for (int step = 0; step < 40; ++step) {
      it.optimizer->zero_grad();
      const at::Tensor loss = it.loss(cells, 0);
      last = loss.item<double>();
      if (step == 0) first = last;
      scaler.scale(loss).backward();
      if (scaler.update(it.parallel.unscale_gradients(scaler))) {
        it.optimizer->step(0.01);
        ++steps;
      }
    }
    cells.expect(steps > 10 && steps < 40, fmt::format("{} of 40 steps were made", steps));
    cells.expect(last < 0.5 * first, fmt::format("the loss went from {} to {}", first, last));
  });
}

void check_quantized(Cells& cells) {
  cells.cell("ZeRO++ trains as floats do", [&] {
    GpuTraining got(cells, {.mixed_precision = kGpuBf16,
                            .zero_plus_plus = {.quantize_weights = true,
                                               .quantize_gradients = true,
                                               .hierarchical_partition = cells.num_ranks()}});
    GpuTraining wanted(cells, {});
    double first = 0;
    double mine = 0;
    double other = 0;
    for (int step = 0; step < 40; ++step) {
      for (auto [it, value] : {std::pair(&got, &mine), std::pair(&wanted, &other)}) {
        it->optimizer->zero_grad();
        const at::Tensor loss = it->loss(cells, 0);
        *value = loss.item<double>();
        loss.backward();
        it->optimizer->step(0.01);
      }
      if (step == 0) first = other;
    }
    cells.expect(other < 0.1 * first && std::abs(mine - other) < 0.05 * first,
                 fmt::format("from {} the loss went to {}, with floats to {}", first, mine, other));
  });
}

#if defined(LOCKSTEP_COUNTS_DEVICE_MEMORY)
void check_growth(Cells& cells) {
  for (const CPUOffload& offload : {CPUOffload{}, CPUOffload{.offload_optimizer = true}})
    cells.cell("no growth over 200 steps", [&] {
      GpuTraining it(cells, {.mixed_precision = kGpuBf16, .cpu_offload = offload});
      const auto allocated = [] {
        return at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).reserved_bytes[0].current;
      };
      std::int64_t early = 0;
      for (int step = 0; step < 200; ++step) {
        it.optimizer->zero_grad();
        it.loss(cells, step).backward();
        it.optimizer->step(0.001);
        if (step == 20) early = allocated();
      }
      cells.expect(allocated() <= early, fmt::format("{} bytes were held after 20 steps, {} after "
                                                     "200",
                                                     early, allocated()));
    });
}
#else
void check_growth(Cells&) {}
#endif

void check_unsummed_steps(Cells& cells) {
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters})
    cells.cell("SGD of LibTorch's on gradients that were never summed", [&] {
      GpuTraining it(cells, {.cut = cut});
      torch::optim::SGD optimizer(it.model->parameters(), torch::optim::SGDOptions(0.1));
      {
        const auto local = it.parallel.no_sync();
        it.loss(cells, 0).backward();
        it.loss(cells, 1).backward();
      }
      cells.expect_usage_error([&] { optimizer.step(); }, "the gradients of 2 backward passes");
      it.loss(cells, 2).backward();
      it.optimizer->step(0.001);
    });
}

#if defined(LOCKSTEP_HAVE_CUDA)
void check_waiting(Cells& cells) {
  // With several ranks, a thread of the transport waits for the data to send, beside the step.
  if (cells.num_ranks() > 1) return;
  for (const MixedPrecision& precision : {MixedPrecision{}, kGpuBf16})
    cells.cell("a step does not wait for the GPU", [&] {
      GpuTraining it(cells, {.mixed_precision = precision});
      const at::Tensor input = GpuTraining::input(cells, 0);
      const auto step = [&] {
        it.optimizer->zero_grad();
        it.loss(input).backward();
        const at::Tensor factor = optim::clip_factor(it.parallel.gradient_norm(), 1e-3);
        it.optimizer->step(0.001, optim::StepFactor(factor));
      };
      // The first step agrees on an order of units.
      for (int i = 0; i < 3; ++i) step();
      const ranks::NoWaiting no_waiting;
      cells.expect(no_waiting.notices(), "nobody watches");
      for (int i = 0; i < 5; ++i) step();
      // Waits for events are not seen by NoWaiting, so the GPU is kept busy for a second: a step
      // that waited would take as long.
      const auto stream = c10::cuda::getCurrentCUDAStream();
      at::cuda::sleep(std::int64_t{2'000'000'000});
      step();
      cells.expect(!stream.query(), "the host has waited for a step's own work");
    });
}
#else
void check_waiting(Cells&) {}
#endif

}  // namespace

void check_gpu(Cells& cells) {
  check_parity_in_16_bits(cells);
  check_scaled(cells);
  check_quantized(cells);
  check_growth(cells);
  check_unsummed_steps(cells);
  check_waiting(cells);
}

}  // namespace lockstep::shard

// Measures sharded training on one GPU. Arguments: one of these measurements, with its arguments.
//   overhead [steps]                 a step with FULL_SHARD on one rank, which has nothing to
//                                    gather, and the same step without Lockstep, in turn
//   offload [GiB] [layers] [width]   a GPT that does not fit into this much of the GPU's memory
//                                    with its optimizer's state, but fits with that on the host
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/models/make_model.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace {

using namespace lockstep;

constexpr double kGiB = 1 << 30;
constexpr std::int64_t kVocabulary = 50304;

double now() {
  at::cuda::getCurrentCUDAStream().synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double allocated_gib() {
  return static_cast<double>(
             c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].peak) /
         kGiB;
}

models::ModelConfig gpt(std::int64_t layers, std::int64_t width, std::int64_t tokens) {
  return {.vocab_size = kVocabulary,
          .hidden_size = width,
          .num_layers = layers,
          .num_heads = width / 128,
          .max_positions = tokens};
}

struct Batch {
  at::Tensor inputs, targets;
};

Batch make_batch(std::int64_t samples, std::int64_t length) {
  const at::Tensor tokens =
      at::randint(kVocabulary, {samples, length + 1}, at::dtype(at::kLong).device(at::kCUDA));
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous()};
}

std::vector<optim::ParameterGroup> decaying(const torch::nn::Module& model) {
  return optim::decay_groups(data_parallel::trained_parameters(model), 0.1);
}

void measure_overhead(int num_steps) {
  const auto config = gpt(12, 1024, 1024);
  auto plain = models::make_model(config, 1);
  plain->to(at::kCUDA);
  const auto plain_optimizer = optim::make_optimizer(optim::AdamWOptions{}, decaying(*plain));
  auto dist = setup_distributed({.mode = ParallelMode::FSDP});
  auto sharded = models::make_model(config, 1);
  sharded->to(dist.device());
  dist.wrap_model(sharded);
  const auto optimizer = dist.make_optimizer(sharded, optim::AdamWOptions{}, decaying(*sharded));
  const Batch batch = make_batch(8, 1024);
  std::vector<double> times[2];
  for (int step = 0; step < num_steps + 3; ++step) {
    double begun = now();
    plain_optimizer->zero_grad();
    const auto loss = plain->loss(batch.inputs, batch.targets);
    (loss.sum / loss.count).backward();
    plain_optimizer->step(1e-4);
    double ended = now();
    if (step >= 3) times[0].push_back(ended - begun);
    begun = ended;
    optimizer->zero_grad();
    const auto again = sharded->loss(batch.inputs, batch.targets);
    dist.backward(sharded, again.sum, again.count);
    optimizer->step(1e-4);
    ended = now();
    if (step >= 3) times[1].push_back(ended - begun);
  }
  std::printf(
      "{\"what\": \"overhead\", \"plain_ms\": %.2f, \"full_shard_ms\": %.2f, \"ratio\": %.4f}\n",
      1e3 * median(times[0]), 1e3 * median(times[1]), median(times[1]) / median(times[0]));
}

void train_plainly(const models::ModelConfig& config, const Batch& batch) {
  try {
    auto model = models::make_model(config, 1);
    model->to(at::kCUDA);
    const auto optimizer = optim::make_optimizer(optim::AdamWOptions{}, decaying(*model));
    const auto loss = model->loss(batch.inputs, batch.targets);
    (loss.sum / loss.count).backward();
    optimizer->step(1e-4);
    std::printf("{\"what\": \"plain\", \"fits\": true, \"peak_gib\": %.2f}\n", allocated_gib());
  } catch (const c10::Error& error) {
    std::printf("{\"what\": \"plain\", \"fits\": false, \"why\": \"%.90s\"}\n",
                error.what_without_backtrace());
  }
  std::fflush(stdout);
}

void measure_offload(double limit_gib, std::int64_t layers, std::int64_t width) {
  const Batch batch = make_batch(4, 512);  // comes first, to wake LibTorch's allocator up
  const double whole = static_cast<double>(at::cuda::getCurrentDeviceProperties()->totalGlobalMem);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(limit_gib * kGiB / whole, 0);
  const auto config = gpt(layers, width, 512);
  train_plainly(config, batch);
  c10::cuda::CUDACachingAllocator::emptyCache();
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);

  auto dist = setup_distributed({.mode = ParallelMode::FSDP,
                                 .fsdp = {.mixed_precision = {.param_dtype = at::kBFloat16},
                                          .cpu_offload = {.offload_optimizer = true}}});
  const double begun = now();
  auto model = dist.build_model([&] { return models::make_model(config, 1); });
  const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{}, decaying(*model));
  const double built = now();
  for (int step = 0; step < 4; ++step) {
    const double start = now();
    optimizer->zero_grad();
    const auto loss = model->loss(batch.inputs, batch.targets);
    dist.backward(model, loss.sum, loss.count);
    const double backward = now();
    const auto clipped = dist.clip_gradients(model, 1.0);
    optimizer->step(1e-4);
    const double end = now();
    std::printf("{\"what\": \"offload\", \"parameters\": %.3e, \"built_s\": %.1f, \"step\": %d, "
                "\"loss\": %.4f, \"norm\": %.4f, \"forward_backward_s\": %.2f, \"update_s\": %.2f, "
                "\"peak_gib\": %.2f}\n",
                static_cast<double>(models::num_parameters(config)), built - begun, step,
                loss.sum.item<double>() / static_cast<double>(loss.count), clipped.norm,
                backward - start, end - backward, allocated_gib());
    std::fflush(stdout);
  }
  std::printf("%s\n", dist.memory_report(model).text().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, double otherwise) {
    return argc > index ? std::atof(argv[index]) : otherwise;
  };
  if (argc > 1 && std::strcmp(argv[1], "overhead") == 0) {
    measure_overhead(static_cast<int>(number(2, 20)));
  } else if (argc > 1 && std::strcmp(argv[1], "offload") == 0) {
    measure_offload(number(2, 64), static_cast<std::int64_t>(number(3, 25)),
                    static_cast<std::int64_t>(number(4, 4096)));
  } else {
    std::fprintf(stderr, "usage: sharding_gpu overhead [steps] | offload [GiB] [layers] [width]\n");
    return 2;
  }
}

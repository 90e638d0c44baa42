// A job that resumes where it stopped, for compare.py to disturb. Trains layers of torch::nn, data
// parallel, with AdamW; pytorch.py is the same job. Runs under `lockstep run`. Arguments: a folder,
// the steps, the number of steps between two checkpoints, the layers' width, and the number of
// steps between two copies in other ranks' memory (0: none). When a step is finished, the main rank
// adds a line with its number to the folder's "steps".
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/recovery/keep_going.h>
#include <lockstep/recovery/peer_copies.h>

namespace lockstep {
namespace {

constexpr int kLayers = 4;
constexpr int kBatch = 32;  // on each rank

torch::nn::Sequential make_model(std::int64_t width) {
  torch::nn::Sequential model;
  for (int layer = 0; layer < kLayers; ++layer) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::GELU());
  }
  return model;
}

struct Job {
  std::filesystem::path folder;
  std::int64_t steps = 0;
  std::int64_t save_every = 0;
  std::int64_t width = 0;
  std::int64_t copy_every = 0;
};

// Restores the newest state and returns its step.
template <typename Model>
std::int64_t restore(DistributedManager& dist, const Model& model, optim::Optimizer& optimizer,
                     const Job& job, PeerCopies& copies) {
  if (const auto state = copies.restore(dist, model, optimizer)) return state->step;
  std::string newest;
  if (dist.is_main())
    if (const auto usable = checkpoint::newest_usable(job.folder / "checkpoints").checkpoint)
      newest = usable->path;
  newest = RankMessages(dist.world()).broadcast(newest);
  return newest.empty() ? 0 : load_checkpoint(dist, newest, model, optimizer).step;
}

// Trains until the job is done, or a rank is lost.
void train(const Job& job, PeerCopies& copies) {
  auto dist = setup_distributed({.device_type = c10::kCPU});
  at::manual_seed(1);
  auto model = dist.wrap_model(make_model(job.width));
  auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
  std::int64_t step = restore(dist, model, *adamw, job, copies);

  std::ofstream log;
  if (dist.is_main()) log.open(job.folder / "steps", std::ios::app);
  const RankMessages ranks(dist.world());
  Checkpointer checkpoints(dist, job.folder / "checkpoints", {.keep_last = 2});
  const auto check = [](const std::optional<SaveResult>& saved) {
    if (saved && !saved->ok()) throw UsageError(saved->error);
  };
  const auto inputs = at::rand({kBatch, job.width});
  while (step < job.steps) {
    adamw->zero_grad();
    dist.backward(model, model->forward(inputs).square().sum(), kBatch);
    adamw->step(1e-4);
    report_progress(++step);
    if (dist.is_main()) log << step << std::endl;
    check(checkpoints.poll());
    const auto contents = [&] {
      return CheckpointContents{.tensors = state_of(dist, model, *adamw), .state = {.step = step}};
    };
    if (step % job.save_every == 0) {
      if (checkpoints.under_way()) check(checkpoints.finish());
      checkpoints.save(contents());
    }
    if (job.copy_every > 0 && step % job.copy_every == 0) copies.take(ranks, contents());
  }
  if (checkpoints.under_way()) check(checkpoints.finish());
  dist.barrier();
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: elastic_lockstep FOLDER STEPS SAVE_EVERY WIDTH COPY_EVERY\n");
    return 2;
  }
  const lockstep::Job job{.folder = argv[1],
                          .steps = std::atoll(argv[2]),
                          .save_every = std::atoll(argv[3]),
                          .width = std::atoll(argv[4]),
                          .copy_every = std::atoll(argv[5])};
  at::set_num_threads(1);
  lockstep::PeerCopies copies;
  lockstep::keep_going([&] { lockstep::train(job, copies); });
}

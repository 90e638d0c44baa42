// A job that goes on from its last checkpoint, to be disturbed. Trains layers of torch::nn, data
// parallel, with AdamW; pytorch.py is the same job. Runs under `lockstep run`. Arguments: a folder,
// the steps, how many steps lie between two checkpoints, and the layers' width. The main rank adds
// a line to the folder's "steps" when a step is finished: its number.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/progress.h>
#include <lockstep/checkpoint/reader.h>
#include <lockstep/distributed/checkpointer.h>

namespace {

constexpr int kLayers = 4;
constexpr int kBatch = 32;  // a rank's

torch::nn::Sequential make_model(std::int64_t width) {
  torch::nn::Sequential model;
  for (int layer = 0; layer < kLayers; ++layer) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::GELU());
  }
  return model;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc < 5) {
    std::fprintf(stderr, "usage: elastic_lockstep FOLDER STEPS STEPS_BETWEEN_SAVES WIDTH\n");
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  const int steps = std::atoi(argv[2]), interval = std::atoi(argv[3]);
  const std::int64_t width = std::atoi(argv[4]);
  at::set_num_threads(1);
  auto dist = setup_distributed({.device_type = c10::kCPU});
  at::manual_seed(1);
  auto model = dist.wrap_model(make_model(width));
  auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});

  const RankMessages ranks(dist.world(), dist.device());
  std::string newest;
  if (dist.is_main())
    if (const auto usable = checkpoint::newest_usable(folder / "checkpoints").checkpoint)
      newest = usable->path;
  newest = ranks.broadcast(newest);
  std::int64_t step = newest.empty() ? 0 : load_checkpoint(dist, newest, model, *adamw).step;

  const int log = dist.is_main() ? ::open((folder / "steps").c_str(),
                                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)
                                 : -1;
  Checkpointer checkpoints(dist, folder / "checkpoints", {.keep_last = 2});
  const auto check = [](const std::optional<SaveResult>& saved) {
    if (saved && !saved->ok()) throw UsageError(saved->error);
  };
  const auto inputs = at::rand({kBatch, width});
  while (step < steps) {
    adamw->zero_grad();
    dist.backward(model, model->forward(inputs).square().sum(), kBatch);
    adamw->step(1e-4);
    report_progress(++step);
    const std::string line = std::to_string(step) + "\n";
    if (log >= 0 && ::write(log, line.data(), line.size()) < 0) return 1;
    check(checkpoints.poll());
    if (step % interval == 0) {
      if (checkpoints.under_way()) check(checkpoints.finish());
      checkpoints.save({.tensors = state_of(dist, model, *adamw), .state = {.step = step}});
    }
  }
  if (checkpoints.under_way()) check(checkpoints.finish());
  dist.barrier();
}

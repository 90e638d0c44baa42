// A Sequential over the ranks of a pipeline, for those who know Pipe of torch or torchgpipe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/sequential_parts.h>

namespace lockstep::pipeline {

// Which micro-batches' activations are computed again in backward instead of kept.
enum class Checkpoint : std::uint8_t {
  never,
  except_last,  // the last one's backward comes at once, so that there is little to save
  always,
};

struct PipeOptions {
  int chunks = 1;  // micro-batches
  Checkpoint checkpoint = Checkpoint::never;
  ScheduleKind schedule = ScheduleKind::gpipe;
  int num_stages_per_rank = 0;  // 0 is the schedule's own
  SequentialCut cut = {};
  c10::Device device = at::kCPU;
};

// Every rank makes one of the same model, with the same options, keeps its stages' children and
// frees the others. Weights that stages of several ranks share begin as those of the first of them.
//
//   Pipe pipe(model, group, {.chunks = 8, .checkpoint = Checkpoint::except_last});
//   torch::optim::SGD optimizer(pipe.parameters(), 0.1);
//   double loss = pipe.forward_backward(input, target, [](const auto& output, const auto& target) {
//     return torch::nn::functional::cross_entropy(output, target, …(torch::kSum)); });
//
// Ownership, threading: as Pipeline. Failure: UsageError, the same on all ranks, where they were
// given different models or options or what cannot be run, and for a batch that cannot be cut or is
// missing where it is needed, after which the pipe goes on; in all else as Pipeline.
class Pipe {
 public:
  // One number: summed over the samples of a micro-batch, so that the sum of all is the batch's.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  Pipe(const torch::nn::Sequential& model, const std::shared_ptr<comm::Communicator>& group,
       const PipeOptions& options);
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  // Input and target [samples, …] are cut into micro-batches along their first dim: chunks that
  // differ by a sample where they do not divide it, and none of them empty. Each call may have
  // another number of samples. The input is looked at on the rank of the first stage, the target on
  // that of the last: others may give none. Returns the summed loss, on every rank, and adds to the
  // gradients of parameters(), which are those of the sum, too.
  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss);
  double evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss);

  // This rank's stages; names in them are those of the whole.
  const std::map<int, torch::nn::Sequential>& stages() const { return parts_.mine; }
  const Cuts& cuts() const { return parts_.cuts; }
  // Each once.
  std::vector<at::Tensor> parameters() const;
  const Pipeline& pipeline() const { return *pipeline_; }

 private:
  std::map<int, Stage> make_stages();
  std::vector<at::Tensor> forward(int stage, int micro_batch,
                                  const std::vector<at::Tensor>& inputs);
  at::Tensor micro_batch_of(const at::Tensor& batch, int micro_batch) const;
  std::string fault_of(const at::Tensor& input, const at::Tensor& target) const;
  std::vector<std::int64_t> agreed_kinds(const at::Tensor& input, const at::Tensor& target) const;
  double with_batch(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                    const std::function<double()>& pass);

  PipeOptions options_;
  Schedule schedule_;
  SequentialParts parts_;
  std::shared_ptr<comm::Communicator> batches_;  // a group for what ranks say of them
  at::Tensor input_;                             // of the call that runs
  at::Tensor target_;                            // likewise
  Loss loss_;                                    // likewise
  std::optional<Pipeline> pipeline_;
};

}  // namespace lockstep::pipeline

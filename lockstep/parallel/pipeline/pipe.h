// A Sequential over the ranks of a pipeline, like Pipe of torch or torchgpipe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/split_model.h>

namespace lockstep::pipeline {

// The micro-batches whose activations are recomputed in backward instead of kept.
enum class Checkpoint : std::uint8_t {
  never,
  except_last,  // the last one's backward follows at once, so that recomputing saves little
  always,
};

struct PipeOptions {
  int chunks = 1;  // micro-batches
  Checkpoint checkpoint = Checkpoint::never;
  ScheduleKind schedule = ScheduleKind::gpipe;
  int num_stages_per_rank = 0;  // 0 is the schedule's own number
  SequentialCut cut = {};
  c10::Device device = at::kCPU;
};

// Every rank makes one of the same model, with the same options, keeps its stages' children and
// frees the others. Weights that stages of several ranks share are broadcast from the first of
// these ranks.
//
//   Pipe pipe(model, group, {.chunks = 8, .checkpoint = Checkpoint::except_last});
//   torch::optim::SGD optimizer(pipe.parameters(), 0.1);
//   double loss = pipe.forward_backward(input, target, [](const auto& output, const auto& target) {
//     return torch::nn::functional::cross_entropy(output, target, …(torch::kSum)); });
//
// Ownership, threading: as Pipeline. Failure: UsageError, the same on all ranks, where models or
// options differ between ranks or cannot be run, and for a batch that cannot be cut or is missing
// where it is needed; the pipe can be used again after that. All other failures are as Pipeline's.
class Pipe {
 public:
  // Returns one number, summed over the samples of a micro-batch.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  Pipe(const torch::nn::Sequential& model, const std::shared_ptr<comm::Communicator>& group,
       const PipeOptions& options);
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  // Input and target [samples, …] are cut into micro-batches along their first dim. Micro-batches
  // are never empty, and differ by one sample if their number does not divide the samples'. Each
  // call may have another number of samples. Only the rank of the first stage needs the input, and
  // only that of the last the target. Returns the summed loss, on every rank, and adds its
  // gradients to those of parameters(). With `output`, the rank of the last stage gets what the
  // model made of all samples, without a graph; it stays as it is on the others.
  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                          at::Tensor* output = nullptr);
  double evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                  at::Tensor* output = nullptr);
  // The model's output, without a graph, on the rank of the last stage; undefined on the others.
  at::Tensor forward(const at::Tensor& input);

  // This rank's stages, with the names of the whole model.
  const std::map<int, torch::nn::Sequential>& stages() const { return parts_.mine; }
  const Cuts& cuts() const { return parts_.cuts; }
  // Each parameter of this rank once.
  std::vector<at::Tensor> parameters() const;
  const Pipeline& pipeline() const { return *pipeline_; }

 private:
  std::map<int, Stage> make_stages();
  std::vector<at::Tensor> run_stage(int stage, int micro_batch,
                                    const std::vector<at::Tensor>& inputs);
  at::Tensor micro_batch_of(const at::Tensor& batch, int micro_batch) const;
  // The arguments of a call. Without a loss the target is not used.
  struct Batch {
    at::Tensor input, target;
    Loss loss;
  };
  std::string fault_of(const Batch& batch) const;
  std::vector<std::int64_t> agreed_kinds(const Batch& batch) const;
  double with_batch(Batch batch, at::Tensor* output, const std::function<double()>& pass);

  PipeOptions options_;
  Schedule schedule_;
  SequentialParts parts_;
  std::shared_ptr<comm::Communicator> batches_;  // a group for messages about batches
  Batch batch_;                                  // of the current call
  bool keeps_outputs_ = false;                   // likewise
  std::map<int, at::Tensor> outputs_;            // of each micro-batch
  std::optional<Pipeline> pipeline_;
};

}  // namespace lockstep::pipeline

// A pipeline of any model's blocks, for engines and trainers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/parallel/pipeline/model_blocks.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/split_model.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// One batch on its way through a pipeline.
struct MicroBatch {
  at::Tensor input;   // [samples, …]
  at::Tensor target;  // likewise; may be undefined
  // Those that count: all of them, or 0 where the batch is only there so that this rank runs the
  // model.
  std::int64_t samples = 0;
};

// A loss of what the last block makes, which is one tensor.
struct OutputLoss {
  // The sum over the micro-batch, and over how many samples or tokens it is.
  std::function<nn::LossSum(const at::Tensor& output, const MicroBatch& batch)> of;
  // Whether the count is something else than the samples, which only the last stage knows then.
  bool counts_itself = false;
};

// Every rank makes one, with the same arguments, and calls the same functions with the same batches
// as the other ranks of its pipeline; only the first stage's rank looks at inputs, and the last
// stage's at targets, but all need the inputs' shapes.
//
// A pipeline is made for each number of micro-batches, once it is needed: the last step of an epoch
// may have fewer.
//
// Ownership: shares the model. Threading: one thread. Failure: UsageError as split_model(), on all
// ranks of the job and before anything is freed; the passes' as pipeline::Pipeline.
class ModulePipeline {
 public:
  struct Options {
    ParallelSection parallel;
    std::int64_t num_micro_batches = 1;  // of a whole step
    // The type that operators compute in; nothing for that of the weights.
    std::optional<c10::ScalarType> autocast = {};
  };

  // Leaves this rank's stages in the model, under their names: between the model's construction and
  // its distribution over the ranks of the data. `blocks` are in the order of the model's forward.
  ModulePipeline(DistributedManager dist, std::shared_ptr<torch::nn::Module> model,
                 std::vector<pipeline::ModelBlock> blocks, Options options);
  ModulePipeline(const ModulePipeline&) = delete;
  ModulePipeline& operator=(const ModulePipeline&) = delete;

  // Once the model is distributed. UsageError, on the ranks that have it, where a tensor axis has
  // cut a weight that stages share.
  void check_tied(const std::shared_ptr<torch::nn::Module>& model);

  // UsageError where a step of so many micro-batches cannot be scheduled.
  void check_size(std::int64_t num_micro_batches) const;

  // Forward and backward of all of a step's micro-batches; adds to the gradients.
  PassesLoss run(const std::vector<MicroBatch>& batches, const OutputLoss& loss,
                 const GradientScale& scale);
  // Forward alone. With `output`, the rank of the last stage gets what it made of the samples that
  // count, one micro-batch after the other.
  PassesLoss evaluate(const std::vector<MicroBatch>& batches, const OutputLoss& loss,
                      at::Tensor* output = nullptr);
  // Gives a tensor of the rank of the last stage to all ranks of the pipeline; all of them call it.
  at::Tensor from_last_stage(at::Tensor output) const;

 private:
  template <typename Pass>
  PassesLoss with_batches(const std::vector<MicroBatch>& batches, const OutputLoss& loss,
                          const Pass& pass);
  bool can_schedule(std::size_t num_micro_batches) const;
  pipeline::Pipeline& pipeline_for(std::size_t num_micro_batches);
  at::Tensor loss_of(std::size_t micro_batch, const std::vector<at::Tensor>& made);
  std::int64_t count_of(const std::vector<MicroBatch>& batches, const OutputLoss& loss) const;

  DistributedManager dist_;
  std::shared_ptr<comm::Communicator> group_;
  Options options_;
  std::vector<int> rank_of_stage_;
  pipeline::ModelStages stages_;
  std::map<std::size_t, std::unique_ptr<pipeline::Pipeline>> pipelines_;  // by micro-batches

  // Of the pass under way.
  std::span<const MicroBatch> batches_;
  std::size_t begin_ = 0;  // the place of the first of them among all that were given
  const OutputLoss* loss_ = nullptr;
  GradientScale scale_;
  std::int64_t count_ = 0;
  bool keeps_outputs_ = false;
  std::map<std::size_t, at::Tensor> outputs_;  // of micro-batches that count
};

// Makes a model with `make`, and leaves each rank its stages of it, distributed over the ranks of
// the data. No rank has the whole model in memory. `list_blocks` is called once the model is made,
// and says what stages are made of. UsageError on all ranks where there are no blocks, or the model
// cannot be cut.
std::unique_ptr<ModulePipeline> build_in_stages(
    DistributedManager& dist, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
    const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
    const ModulePipeline::Options& options);

}  // namespace lockstep::train

// A language model whose stages are on several ranks, as a trainer runs it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <lockstep/data/dataset.h>
#include <lockstep/models/language_model.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/generate.h>

namespace lockstep::train {

struct PipelineChoice {
  pipeline::ScheduleKind schedule = pipeline::ScheduleKind::one_forward_one_backward;
  int num_chunks = 0;            // stages a rank; 0: the schedule's own
  std::int64_t micro_batch = 1;  // samples
};

// Gives this rank's stages to the model, which keeps nothing else, and runs steps of micro-batches
// through all of them. Every rank of the group makes one, with the same model, and calls the same
// functions with the same batches.
//
// Ownership: shares model and group. Threading: one thread. Failure: as pipeline::Pipeline.
class LanguageModelPipeline {
 public:
  LanguageModelPipeline(std::shared_ptr<models::LanguageModel> model,
                        std::shared_ptr<comm::Communicator> group, const PipelineChoice& choice);

  // Forward and backward of a step's batches: their summed loss, on every rank.
  double run(std::int64_t step, const std::vector<data::Batch>& batches);
  // Forward of one batch of as many samples, or fewer.
  double evaluate(const data::Batch& batch);

  // Targets of a batch that count on this rank of the data.
  std::int64_t count(const data::Batch& batch) const;

 private:
  pipeline::Pipeline& pipeline_of(int num_micro_batches);
  pipeline::Schedule schedule_of(int num_micro_batches) const;
  std::vector<at::Tensor> forward(mesh::Interval layers, int micro_batch,
                                  const std::vector<at::Tensor>& inputs);

  std::shared_ptr<models::LanguageModel> model_;
  std::shared_ptr<comm::Communicator> group_;
  PipelineChoice choice_;
  std::map<int, mesh::Interval> layers_;                          // of this rank's stages
  std::map<int, std::unique_ptr<pipeline::Pipeline>> pipelines_;  // by number of micro-batches
  const std::vector<data::Batch>* batches_ = nullptr;             // of the step under way
  std::int64_t step_ = 0;
};

}  // namespace lockstep::train

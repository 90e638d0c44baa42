#include <lockstep/train/language_model_pipeline.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

// With samples that do not count: all that go through a pipeline have one shape.
data::Batch filled_up(data::Batch batch, std::int64_t size) {
  const std::int64_t missing = size - batch.size();
  if (missing <= 0) return batch;
  batch.input = at::cat({batch.input, batch.input.narrow(0, 0, 1).expand({missing, -1})});
  const at::Tensor& target = batch.target;
  batch.target =
      at::cat({target, at::full({missing, target.size(1)}, nn::kIgnoredTarget, target.options())});
  batch.rows.resize(static_cast<std::size_t>(size));
  return batch;
}

}  // namespace

LanguageModelPipeline::LanguageModelPipeline(std::shared_ptr<models::LanguageModel> model,
                                             std::shared_ptr<comm::Communicator> group,
                                             const PipelineChoice& choice)
    : model_(std::move(model)), group_(std::move(group)), choice_(choice) {
  const pipeline::Schedule schedule = schedule_of(1);
  std::vector<mesh::Interval> mine;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] != group_->rank()) continue;
    mine.push_back(mesh::part_of(model_->config().num_layers, stage, schedule.num_stages()));
    layers_[stage] = mine.back();
  }
  model_->keep_layers(mine);
}

pipeline::Schedule LanguageModelPipeline::schedule_of(int num_micro_batches) const {
  return pipeline::make_schedule(choice_.schedule, {.num_ranks = group_->size(),
                                                    .num_micro_batches = num_micro_batches,
                                                    .num_chunks = choice_.num_chunks});
}

pipeline::Pipeline& LanguageModelPipeline::pipeline_of(int num_micro_batches) {
  auto& found = pipelines_[num_micro_batches];
  if (found != nullptr) return *found;
  std::map<int, pipeline::Stage> stages;
  for (const auto& [stage, layers] : layers_)
    stages[stage] = {.forward =
                         [this, layers = layers](int micro_batch, const auto& inputs) {
                           return forward(layers, micro_batch, inputs);
                         },
                     .parameters = model_->parameters()};
  pipeline::Schedule schedule = schedule_of(num_micro_batches);
  pipeline::PipelineOptions options{.device = model_->parameters().front().device()};
  if (model_->config().tie_embeddings)
    options.tied.push_back({{0, schedule.num_stages() - 1}, model_->tied_weight()});
  found = std::make_unique<pipeline::Pipeline>(std::move(schedule), std::move(stages), group_,
                                               std::move(options));
  return *found;
}

double LanguageModelPipeline::run(std::int64_t step, const std::vector<data::Batch>& batches) {
  batches_ = &batches;
  step_ = step;
  return pipeline_of(static_cast<int>(batches.size())).run_step();
}

double LanguageModelPipeline::evaluate(const data::Batch& batch) {
  const std::vector<data::Batch> batches = {filled_up(batch, choice_.micro_batch)};
  batches_ = &batches;
  return pipeline_of(1).evaluate();
}

std::int64_t LanguageModelPipeline::count(const data::Batch& batch) const {
  return model_->axes()
      .attended_part(batch.target)
      .ne(nn::kIgnoredTarget)
      .sum()
      .item<std::int64_t>();
}

std::vector<at::Tensor> LanguageModelPipeline::forward(mesh::Interval layers, int micro_batch,
                                                       const std::vector<at::Tensor>& inputs) {
  const data::Batch& batch = (*batches_)[static_cast<std::size_t>(micro_batch)];
  model_->set_random_position(static_cast<std::uint64_t>(step_), batch.rows);
  const at::Tensor made =
      model_->run_layers(layers, batch.input, inputs.empty() ? at::Tensor() : inputs.front());
  const bool last = layers.end == model_->config().num_layers;
  return {last ? model_->loss_of(made, batch.target).sum : made};
}

}  // namespace lockstep::train

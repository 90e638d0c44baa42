#include <lockstep/parallel/pipeline/pipe.h>

#include <set>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep::pipeline {

Pipe::Pipe(const torch::nn::Sequential& model, const std::shared_ptr<comm::Communicator>& group,
           const PipeOptions& options)
    : options_(options),
      schedule_(make_schedule(options.schedule, {.num_ranks = group->size(),
                                                 .num_micro_batches = options.chunks,
                                                 .num_chunks = options.num_stages_per_rank})),
      parts_(split_sequential(model, schedule_.rank_of_stage, *group, options.cut)) {
  for (auto& [index, part] : parts_.mine) part->to(options.device);
  pipeline_.emplace(schedule_, make_stages(), group,
                    PipelineOptions{.device = options.device, .tied = parts_.tied});
}

std::map<int, Stage> Pipe::make_stages() {
  std::map<int, Stage> stages;
  for (const auto& [index, part] : parts_.mine)
    stages[index] = {[this, stage = index](int micro_batch, const std::vector<at::Tensor>& inputs) {
                       return forward(stage, micro_batch, inputs);
                     },
                     part->parameters()};
  return stages;
}

std::vector<at::Tensor> Pipe::parameters() const {
  std::vector<at::Tensor> all;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [index, part] : parts_.mine)
    for (const at::Tensor& parameter : part->parameters())
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
  return all;
}

at::Tensor Pipe::micro_batch_of(const at::Tensor& batch, int micro_batch, const char* what) const {
  if (!batch.defined())
    throw UsageError("the rank of a pipe's {} stage was given no {}",
                     what == std::string_view("input") ? "first" : "last", what);
  if (batch.dim() == 0 || batch.size(0) == 0 || batch.size(0) % options_.chunks != 0)
    throw UsageError("{} of a pipe's {} cannot be cut into {} equal micro-batches: choose a number "
                     "of chunks that divides it",
                     batch.dim() == 0 ? 1 : batch.size(0), what, options_.chunks);
  return batch.chunk(options_.chunks)[static_cast<std::size_t>(micro_batch)].to(options_.device);
}

std::vector<at::Tensor> Pipe::forward(int stage, int micro_batch,
                                      const std::vector<at::Tensor>& inputs) {
  torch::nn::Sequential part = parts_.mine.at(stage);
  const at::Tensor input = stage == 0 ? micro_batch_of(input_, micro_batch, "input") : inputs.at(0);
  const bool last_batch = micro_batch + 1 == schedule_.num_micro_batches;
  const bool again = options_.checkpoint == Checkpoint::always ||
                     (options_.checkpoint == Checkpoint::except_last && !last_batch);
  // Of a copy: the first child may write into what it is given, and is to find it again.
  const auto from_copy = [part](const at::Tensor& x) mutable { return part->forward(x.clone()); };
  const at::Tensor output =
      again ? activations::recompute_in({.buffers = part->buffers()}, from_copy, input)
            : part->forward(input);
  if (stage + 1 < schedule_.num_stages()) return {output};
  return {loss_(output, micro_batch_of(target_, micro_batch, "target"))};
}

double Pipe::with_batch(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                        const std::function<double()>& pass) {
  input_ = input;
  target_ = target;
  loss_ = loss;
  const double sum = pass();
  input_ = target_ = at::Tensor();
  loss_ = nullptr;
  return sum;
}

double Pipe::forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  return with_batch(input, target, loss, [&] { return pipeline_->run_step(); });
}

double Pipe::evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  return with_batch(input, target, loss, [&] { return pipeline_->evaluate(); });
}

}  // namespace lockstep::pipeline

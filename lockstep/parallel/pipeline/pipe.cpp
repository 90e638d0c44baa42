#include <lockstep/parallel/pipeline/pipe.h>

#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/pipeline/model_blocks.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep::pipeline {

namespace {

// Makes the schedule on all ranks, or throws on all of them.
Schedule agreed_schedule(const PipeOptions& options, comm::Communicator& group) {
  Schedule schedule;
  std::string fault;
  try {
    schedule = make_schedule(options.schedule, {.num_ranks = group.size(),
                                                .num_micro_batches = options.chunks,
                                                .num_chunks = options.num_stages_per_rank});
  } catch (const UsageError& error) {
    fault = error.what();
  }
  data_parallel::refuse_together(fault, group);
  check_same_lines(
      {fmt::format("{} chunks", options.chunks), fmt::format("the schedule {}", schedule.name),
       fmt::format("{} stages a rank", options.num_stages_per_rank),
       fmt::format("checkpoint {}", static_cast<int>(options.checkpoint))},
      group);
  return schedule;
}

std::string fault_of_part(const at::Tensor& batch, int chunks, const char* what,
                          const char* stage) {
  if (!batch.defined())
    return fmt::format("the rank of a pipe's {} stage was given no {}", stage, what);
  const std::int64_t num_samples = batch.dim() == 0 ? 0 : batch.size(0);
  if (num_samples >= chunks) return "";
  return fmt::format("{} samples of a pipe's {} cannot be cut into {} micro-batches: give it more, "
                     "or make a pipe of fewer chunks",
                     num_samples, what, chunks);
}

}  // namespace

Pipe::Pipe(const torch::nn::Sequential& model, const std::shared_ptr<comm::Communicator>& group,
           const PipeOptions& options)
    : options_(options),
      schedule_(agreed_schedule(options, *group)),
      parts_(split_sequential(model, schedule_.rank_of_stage, *group, options.cut)),
      batches_(group->split(0, group->rank(), fmt::format("{}, batches", group->name()),
                            comm::GroupTensors::on_host)) {
  for (auto& [index, part] : parts_.mine) part->to(options.device);
  pipeline_.emplace(schedule_, make_stages(), group,
                    PipelineOptions{.device = options.device, .tied = parts_.tied});
}

std::map<int, Stage> Pipe::make_stages() {
  std::map<int, Stage> stages;
  for (const auto& [index, part] : parts_.mine)
    stages[index] = {[this, stage = index](int micro_batch, const std::vector<at::Tensor>& inputs) {
                       return run_stage(stage, micro_batch, inputs);
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

at::Tensor Pipe::micro_batch_of(const at::Tensor& batch, int micro_batch) const {
  return batch.tensor_split(options_.chunks)[static_cast<std::size_t>(micro_batch)].to(
      options_.device);
}

std::string Pipe::fault_of(const Batch& batch) const {
  std::string fault;
  if (parts_.mine.contains(0))
    fault = fault_of_part(batch.input, options_.chunks, "input", "first");
  if (fault.empty() && batch.loss && parts_.mine.contains(schedule_.num_stages() - 1))
    fault = fault_of_part(batch.target, options_.chunks, "target", "last");
  return fault;
}

// Tells all ranks about a batch before they run it, and returns a kind for each micro-batch's
// shape.
std::vector<std::int64_t> Pipe::agreed_kinds(const Batch& given) const {
  const auto& [input, target, loss] = given;
  const std::string fault = fault_of(given);
  const auto size_of = [&](const at::Tensor& batch) {
    return fault.empty() && batch.defined() && batch.dim() > 0 ? batch.size(0) : 0;
  };
  std::string shape;  // of a sample
  if (size_of(input) > 0)
    shape = fmt::format("{} {} {}", c10::toString(input.scalar_type()), input.requires_grad(),
                        fmt::join(input.sizes().slice(1), ", "));
  const at::Tensor mine = at::tensor({std::int64_t{fault.empty() ? 0 : 1}, size_of(input),
                                      size_of(target), static_cast<std::int64_t>(hash_text(shape))},
                                     at::kLong);
  const at::Tensor all = at::empty({batches_->size(), 4}, at::kLong);
  batches_->all_gather(all, mine).wait();
  if (all.select(1, 0).any().item<bool>()) data_parallel::refuse_together(fault, *batches_);
  const auto said = all.accessor<std::int64_t, 2>();
  const auto first = said[schedule_.rank_of_stage.front()];
  const std::int64_t num_samples = first[1];
  const std::int64_t num_targets = said[schedule_.rank_of_stage.back()][2];
  if (loss && num_samples != num_targets)
    throw UsageError("a pipe was given an input of {} samples and a target of {}", num_samples,
                     num_targets);
  std::vector<std::int64_t> kinds;
  for (int i = 0; i < options_.chunks; ++i) {
    const bool has_one_more = i < num_samples % options_.chunks;
    kinds.push_back(static_cast<std::int64_t>(hash_text(fmt::format(
        "{} of {}", num_samples / options_.chunks + (has_one_more ? 1 : 0), first[3]))));
  }
  return kinds;
}

std::vector<at::Tensor> Pipe::run_stage(int stage, int micro_batch,
                                        const std::vector<at::Tensor>& inputs) {
  torch::nn::Sequential part = parts_.mine.at(stage);
  const at::Tensor input = stage == 0 ? micro_batch_of(batch_.input, micro_batch) : inputs.at(0);
  const bool last_batch = micro_batch + 1 == schedule_.num_micro_batches;
  const bool again = options_.checkpoint == Checkpoint::always ||
                     (options_.checkpoint == Checkpoint::except_last && !last_batch);
  // A copy is passed: the first child may write into its input, and the second run needs the
  // original.
  const auto from_copy = [part](const at::Tensor& x) mutable { return part->forward(x.clone()); };
  const at::Tensor output =
      again ? activations::recompute_in({.buffers = part->buffers()}, from_copy, input)
            : part->forward(input);
  if (stage + 1 < schedule_.num_stages()) return {output};
  if (keeps_outputs_) outputs_[micro_batch] = output.detach();
  if (!batch_.loss) return {at::zeros({}, output.options())};
  return {batch_.loss(output, micro_batch_of(batch_.target, micro_batch))};
}

double Pipe::with_batch(Batch batch, at::Tensor* output, const std::function<double()>& pass) {
  pipeline_->expect_kinds(agreed_kinds(batch));
  batch_ = std::move(batch);
  keeps_outputs_ = output != nullptr;
  outputs_.clear();
  const double sum = pass();
  batch_ = {};
  std::vector<at::Tensor> parts;
  for (const auto& [micro_batch, part] : std::exchange(outputs_, {})) parts.push_back(part);
  if (!parts.empty()) *output = at::cat(parts);
  return sum;
}

double Pipe::forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                              at::Tensor* output) {
  return with_batch({input, target, loss}, output, [&] { return pipeline_->run_step(); });
}

double Pipe::evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss,
                      at::Tensor* output) {
  return with_batch({input, target, loss}, output, [&] { return pipeline_->evaluate(); });
}

at::Tensor Pipe::forward(const at::Tensor& input) {
  at::Tensor output;
  with_batch({input, {}, nullptr}, &output, [&] { return pipeline_->evaluate(); });
  return output;
}

}  // namespace lockstep::pipeline

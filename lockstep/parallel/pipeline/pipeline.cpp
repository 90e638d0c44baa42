#include <lockstep/parallel/pipeline/pipeline.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/check.h>

namespace lockstep::pipeline {

namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Before anything is made of it.
Schedule checked(Schedule schedule, const std::map<int, Stage>& stages,
                 const comm::Communicator& group) {
  check(schedule);
  if (schedule.num_ranks() != group.size())
    throw UsageError("the schedule '{}' is for {} ranks, and the pipeline '{}' has {}",
                     schedule.name, schedule.num_ranks(), group.name(), group.size());
  std::vector<int> wanted, given;
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == group.rank())
      wanted.push_back(stage);
  for (const auto& [index, stage] : stages) {
    given.push_back(index);
    if (!stage.forward) throw UsageError("stage {} of the pipeline has no forward", index);
  }
  if (wanted != given)
    throw UsageError("the schedule '{}' has the stages [{}] on rank {} of the pipeline, which was "
                     "given [{}]",
                     schedule.name, fmt::join(wanted, ", "), group.rank(), fmt::join(given, ", "));
  return schedule;
}

// What the next stage, of this rank, is given: a graph of its own begins there.
std::vector<at::Tensor> detached(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& output : outputs)
    inputs.push_back(output.detach().requires_grad_(output.requires_grad()));
  return inputs;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& input : inputs) gradients.push_back(input.grad());
  return gradients;
}

void backward_whole(const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> roots, starts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    // Of the last stage, whose output is a loss, there is none.
    if (!gradients[i].defined() && outputs[i].numel() != 1) continue;
    roots.push_back(outputs[i]);
    starts.push_back(gradients[i]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, starts);
}

bool has_split_backward(const Schedule& schedule, int rank) {
  return std::ranges::any_of(
      schedule.actions[static_cast<std::size_t>(rank)],
      [](const Action& action) { return action.kind == ActionKind::backward_input; });
}

}  // namespace

Pipeline::Pipeline(Schedule schedule, std::map<int, Stage> stages,
                   const std::shared_ptr<comm::Communicator>& group, PipelineOptions options)
    : schedule_(checked(std::move(schedule), stages, *group)),
      stages_(std::move(stages)),
      group_(group),
      options_(std::move(options)),
      channels_(schedule_, *group_, options_.device) {
  if (has_split_backward(schedule_, group_->rank()))
    for (const auto& [index, stage] : stages_) splits_.emplace(index, stage.parameters);
  make_tied_groups();
}

void Pipeline::make_tied_groups() {
  for (const TiedParameter& tied : options_.tied) {
    std::set<int> ranks;
    for (const int stage : tied.stages)
      ranks.insert(schedule_.rank_of_stage.at(static_cast<std::size_t>(stage)));
    const bool mine = ranks.contains(group_->rank());
    if (mine && !tied.mine.defined())
      throw UsageError("rank {} of the pipeline has one of the stages [{}] that share a parameter, "
                       "and did not say which it is",
                       group_->rank(), fmt::join(tied.stages, ", "));
    tied_groups_.push_back(ranks.size() < 2
                               ? nullptr
                               : group_->split(mine ? 0 : -1, group_->rank(),
                                               fmt::format("{}, tied stages {}", group_->name(),
                                                           fmt::join(tied.stages, ","))));
  }
}

double Pipeline::run_step() {
  loss_ = at::Tensor();
  spans_.clear();
  most_live_ = 0;
  for (const Action& action : schedule_.actions[static_cast<std::size_t>(group_->rank())])
    run(action);
  channels_.finish_sends();
  sum_tied();
  LOCKSTEP_CHECK(live_.empty() && handed_over_.empty() && handed_back_.empty());
  return loss_of_all_ranks();
}

double Pipeline::evaluate() {
  const c10::NoGradGuard no_grad;
  loss_ = at::Tensor();
  spans_.clear();
  for (const Action& action : schedule_.actions[static_cast<std::size_t>(group_->rank())]) {
    if (action.kind != ActionKind::forward && action.kind != ActionKind::send_activation &&
        action.kind != ActionKind::receive_activation)
      continue;
    run(action);
    // Nobody comes back for it once the next stage has it.
    const bool sent = is_sent(schedule_, action.stage, action.stage + 1);
    if (action.kind == (sent ? ActionKind::send_activation : ActionKind::forward))
      live_.erase({action.stage, action.micro_batch});
  }
  channels_.finish_sends();
  return loss_of_all_ranks();
}

void Pipeline::run(const Action& action) {
  const Key key{action.stage, action.micro_batch};
  switch (action.kind) {
    case ActionKind::send_activation:
      return channels_.send_activations(action.stage, live_.at(key).outputs);
    case ActionKind::receive_activation:
      return channels_.start_receiving_activations(action.stage, action.micro_batch);
    case ActionKind::send_gradient: {
      Live& live = live_.at(key);
      channels_.send_gradients(action.stage, live.inputs);
      live.inputs.clear();
      live.gradient_passed_on = true;
      return erase_if_done(action);
    }
    case ActionKind::receive_gradient:
      return channels_.start_receiving_gradients(action.stage, action.micro_batch);
    case ActionKind::forward: return forward(action);
    case ActionKind::backward:
    case ActionKind::backward_input: return backward(action);
    case ActionKind::backward_weight: return backward_weight(action);
  }
}

void Pipeline::forward(const Action& action) {
  const Key key{action.stage, action.micro_batch};
  Live live{.inputs = inputs_of(action)};
  const double start = seconds_now();
  live.outputs = stages_.at(action.stage).forward(action.micro_batch, live.inputs);
  if (is_last(action.stage)) {
    if (live.outputs.size() != 1 || live.outputs[0].numel() != 1)
      throw UsageError("the last stage of the pipeline returned {}: it must be one number, the "
                       "loss summed over the micro-batch",
                       shape_of(live.outputs).text());
    const at::Tensor loss = live.outputs[0].detach().reshape({}).to(at::kDouble);
    loss_ = loss_.defined() ? loss_ + loss : loss;
  } else if (is_mine(action.stage + 1)) {
    handed_over_[{action.stage + 1, action.micro_batch}] = detached(live.outputs);
  }
  spans_.push_back({start, seconds_now(), action});
  live_[key] = std::move(live);
  most_live_ = std::max(most_live_, static_cast<int>(live_.size()));
}

std::vector<at::Tensor> Pipeline::inputs_of(const Action& action) {
  if (action.stage == 0) return {};
  if (!is_mine(action.stage - 1))
    return channels_.receive_activations(action.stage, action.micro_batch);
  auto found = handed_over_.extract({action.stage, action.micro_batch});
  return std::move(found.mapped());
}

std::vector<at::Tensor> Pipeline::output_gradients_of(const Action& action) {
  if (is_last(action.stage)) return {at::Tensor()};
  if (!is_mine(action.stage + 1))
    return channels_.receive_gradients(action.stage, action.micro_batch);
  auto found = handed_back_.extract({action.stage, action.micro_batch});
  return std::move(found.mapped());
}

void Pipeline::backward(const Action& action) {
  const Key key{action.stage, action.micro_batch};
  const std::vector<at::Tensor> gradients = output_gradients_of(action);
  Live& live = live_.at(key);
  const double start = seconds_now();
  if (action.kind == ActionKind::backward)
    backward_whole(live.outputs, gradients);
  else
    live.weight_half = splits_.at(action.stage).backward_input(live.outputs, gradients);
  live.outputs.clear();
  live.weights_done = action.kind == ActionKind::backward;
  spans_.push_back({start, seconds_now(), action});
  if (is_sent(schedule_, action.stage, action.stage - 1)) return;
  if (action.stage > 0)
    handed_back_[{action.stage - 1, action.micro_batch}] = gradients_of(live.inputs);
  live.inputs.clear();
  live.gradient_passed_on = true;
  erase_if_done(action);
}

void Pipeline::backward_weight(const Action& action) {
  Live& live = live_.at({action.stage, action.micro_batch});
  const double start = seconds_now();
  live.weight_half.run();
  live.weights_done = true;
  spans_.push_back({start, seconds_now(), action});
  erase_if_done(action);
}

void Pipeline::erase_if_done(const Action& action) {
  const auto found = live_.find({action.stage, action.micro_batch});
  if (found->second.gradient_passed_on && found->second.weights_done) live_.erase(found);
}

void Pipeline::sum_tied() {
  for (std::size_t i = 0; i < options_.tied.size(); ++i) {
    if (tied_groups_[i] == nullptr) continue;
    at::Tensor parameter = options_.tied[i].mine;
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    tied_groups_[i]->all_reduce(parameter.grad()).wait();
  }
}

Timeline Pipeline::timeline() const {
  const auto on_device = at::dtype(at::kDouble).device(device_for_numbers());
  std::vector<at::Tensor> all;  // of each rank [2 · spans]: starts and ends
  Timeline timeline;
  for (const std::vector<Action>& actions : schedule_.actions) {
    std::vector<Span>& spans = timeline.ranks.emplace_back();
    for (const Action& action : actions)
      if (!is_transfer(action.kind)) spans.push_back({0, 0, action});
    all.push_back(at::empty({2 * static_cast<std::int64_t>(spans.size())}, on_device));
  }
  // The clock is the host's, and one for all of its processes.
  const bool one_host = group_->backend() == "shm";
  std::vector<double> mine;
  for (const Span& span : spans_) {
    const double origin = one_host ? 0 : spans_.front().start;
    mine.insert(mine.end(), {span.start - origin, span.end - origin});
  }
  if (mine.size() !=
      static_cast<std::size_t>(all[static_cast<std::size_t>(group_->rank())].numel()))
    throw UsageError("there is no timeline before the first step of a pipeline");
  group_->all_gather(all, at::tensor(mine, at::kDouble).to(on_device.device())).wait();
  double first = one_host ? std::numeric_limits<double>::max() : 0;
  for (at::Tensor& one : all) {
    one = one.cpu();
    if (one_host) first = std::min(first, one.min().item<double>());
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const double* next = all[rank].data_ptr<double>();
    for (Span& span : timeline.ranks[rank]) {
      span.start = *next++ - first;
      span.end = *next++ - first;
    }
  }
  return timeline;
}

c10::Device Pipeline::device_for_numbers() const {
  return group_->backend() == "nccl" ? options_.device : c10::Device(at::kCPU);
}

double Pipeline::loss_of_all_ranks() const {
  const at::Tensor sum = at::zeros({}, at::dtype(at::kDouble).device(device_for_numbers()));
  if (loss_.defined()) sum.copy_(loss_);
  group_->all_reduce(sum).wait();
  return sum.item<double>();
}

}  // namespace lockstep::pipeline

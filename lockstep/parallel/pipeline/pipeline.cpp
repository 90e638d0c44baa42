#include <lockstep/parallel/pipeline/pipeline.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/parallel/pipeline/messages.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/parallel/pipeline/split_backward.h>

namespace lockstep::pipeline {

namespace {

void check_stages(const Schedule& schedule, const std::map<int, Stage>& stages, int rank) {
  std::vector<int> wanted, given;
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == rank) wanted.push_back(stage);
  for (const auto& [index, stage] : stages) {
    given.push_back(index);
    if (!stage.forward) throw UsageError("stage {} of the pipeline has no forward", index);
  }
  if (wanted != given)
    throw UsageError("the schedule '{}' has the stages [{}] on rank {} of the pipeline, which was "
                     "given [{}]",
                     schedule.name, fmt::join(wanted, ", "), rank, fmt::join(given, ", "));
}

void check_tied(const Schedule& schedule, const std::vector<TiedParameter>& tied, int rank) {
  for (const TiedParameter& parameter : tied) {
    bool mine = false;
    for (const int stage : parameter.stages) {
      if (stage < 0 || stage >= schedule.num_stages())
        throw UsageError("a parameter is said to be that of stage {}, and the schedule '{}' has {}",
                         stage, schedule.name, schedule.num_stages());
      mine |= schedule.rank_of_stage[static_cast<std::size_t>(stage)] == rank;
    }
    if (mine && !parameter.mine.defined())
      throw UsageError("rank {} of the pipeline has one of the stages [{}] that share a parameter, "
                       "and did not say which it is",
                       rank, fmt::join(parameter.stages, ", "));
  }
}

void check_given(const Schedule& schedule, const std::map<int, Stage>& stages,
                 const PipelineOptions& options, const comm::Communicator& group) {
  check(schedule);
  if (schedule.num_ranks() != group.size())
    throw UsageError("the schedule '{}' is for {} ranks, and the pipeline '{}' has {}",
                     schedule.name, schedule.num_ranks(), group.name(), group.size());
  check_stages(schedule, stages, group.rank());
  check_tied(schedule, options.tied, group.rank());
}

std::int64_t number_of(const std::string& text) {
  return static_cast<std::int64_t>(hash_text(text));
}

std::string text_of(const std::vector<TiedParameter>& tied) {
  std::string text;
  for (const TiedParameter& parameter : tied)
    text += fmt::format("[{}]", fmt::join(parameter.stages, ", "));
  return text;
}

// Checks that the arguments of all ranks fit together. Every rank calls it before it makes
// anything, so that none waits for one that threw. A rank with arguments that cannot be run throws
// UsageError, and all others one that names it; all throw where schedules or tied parameters
// differ.
//
// Returns a group of the same ranks for the pipeline's own calls, which can be aborted without the
// caller's group.
std::shared_ptr<comm::Communicator> agreed_group(const Schedule& schedule,
                                                 const std::map<int, Stage>& stages,
                                                 const PipelineOptions& options,
                                                 comm::Communicator& group) {
  std::exception_ptr refused;
  try {
    check_given(schedule, stages, options, group);
  } catch (const UsageError&) {
    refused = std::current_exception();
  }
  const at::Tensor mine =
      at::tensor({refused ? std::int64_t{1} : std::int64_t{0}, number_of(to_text(schedule)),
                  number_of(text_of(options.tied))},
                 at::kLong);
  const at::Tensor all = at::empty({group.size(), 3}, at::kLong);
  group.all_gather(all, mine).wait();
  if (refused) std::rethrow_exception(refused);
  const auto said = all.accessor<std::int64_t, 2>();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (said[rank][0] != 0)
      throw UsageError("rank {} of the pipeline '{}' was given what cannot be run: its own error "
                       "says what",
                       rank, group.name());
    for (const int number : {1, 2})
      if (said[rank][number] != said[0][number])
        throw UsageError("ranks 0 and {} of the pipeline '{}' were given different {}: give all "
                         "ranks the same",
                         rank, group.name(), number == 1 ? "schedules" : "tied parameters");
  }
  return group.split(0, group.rank(), fmt::format("{}, pipeline", group.name()));
}

struct Entrance : torch::autograd::Function<Entrance> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& leaf) {
    return leaf.tensor_data();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* /*context*/,
                                          std::vector<at::Tensor> gradients) {
    return gradients;
  }
};

// The outputs of a stage as inputs of the next stage on this rank: leaves, which begin a new graph.
std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& output : outputs)
    inputs.push_back(output.detach().requires_grad_(output.requires_grad()));
  return inputs;
}

// The inputs that a stage's forward is called with: its first operator could not write into leaves,
// as an in-place activation does. Nothing is copied.
std::vector<at::Tensor> entered(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& leaf : leaves)
    inputs.push_back(leaf.requires_grad() ? Entrance::apply(leaf) : leaf);
  return inputs;
}

// A gradient for each leaf; zeros where a leaf wants one and got none, as when gradients are sent.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : leaves)
    gradients.push_back(leaf.requires_grad() && !leaf.grad().defined() ? at::zeros_like(leaf)
                                                                       : leaf.grad());
  return gradients;
}

// A whole backward pass. An undefined gradient belongs to a loss.
void backward_whole(const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> roots, starts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
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

// What a pipeline does; Pipeline says what its functions are.
class Pipeline::Execution {
 public:
  Execution(Schedule schedule, std::map<int, Stage> stages,
            const std::shared_ptr<comm::Communicator>& group, PipelineOptions options);

  const Schedule& schedule() const { return schedule_; }
  void expect_kinds(std::vector<std::int64_t> kinds);
  double run_step(TimesOf times);
  double evaluate();
  Timeline timeline() const;
  int most_live() const { return most_live_; }

 private:
  using Key = std::pair<int, int>;  // stage, micro-batch
  struct Live {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    WeightHalf weight_half;
    bool gradient_passed_on = false;  // or no stage needs it
    bool weights_done = false;
  };

  double unless_over(const std::function<double()>& pass);
  void end(const std::string& reason);
  double step();
  double forwards();
  void run(const Action& action);
  void forward(const Action& action);
  void backward(const Action& action);
  void backward_weight(const Action& action);
  std::vector<at::Tensor> inputs_of(const Action& action);
  std::vector<at::Tensor> output_gradients_of(const Action& action);
  void erase_if_done(const Action& action);
  double time_now() const;
  bool on_one_host() const;
  void check_outputs(int stage, const std::vector<at::Tensor>& outputs) const;
  void finish_sends();
  double loss_of_all_ranks();
  bool is_last(int stage) const { return stage + 1 == schedule_.num_stages(); }
  bool is_mine(int stage) const { return stages_.contains(stage); }

  Schedule schedule_;
  std::map<int, Stage> stages_;
  std::map<int, SplitBackward> splits_;
  PipelineOptions options_;
  std::shared_ptr<comm::Communicator> group_;  // the pipeline's own
  TiedGradients tied_;
  Channels channels_;
  std::map<Key, Live> live_;
  std::map<Key, std::vector<at::Tensor>> handed_over_;  // inputs from a stage of this rank
  std::map<Key, std::vector<at::Tensor>> handed_back_;  // gradients of outputs, likewise
  StepLoss loss_;
  TimesOf times_ = TimesOf::work_asked_for;
  std::vector<Span> spans_;  // of this rank, by its own clock
  int most_live_ = 0;
  std::string under_way_;  // the action that was begun last, for messages
  std::string over_;       // why the pipeline is over; empty if it is not
};

Pipeline::Execution::Execution(Schedule schedule, std::map<int, Stage> stages,
                               const std::shared_ptr<comm::Communicator>& group,
                               PipelineOptions options)
    : schedule_(std::move(schedule)),
      stages_(std::move(stages)),
      options_(std::move(options)),
      group_(agreed_group(schedule_, stages_, options_, *group)),
      tied_(options_.tied, schedule_, *group_),
      channels_(schedule_, *group_, options_.device),
      loss_(group_, schedule_.rank_of_stage.back(), schedule_.num_micro_batches, options_.device) {
  if (has_split_backward(schedule_, group_->rank()))
    for (const auto& [index, stage] : stages_) splits_.emplace(index, stage.parameters);
  // A pipeline that is still being made could not tell its neighbours why another rank has ended
  // it. The barrier uses the caller's group, which nobody aborts.
  group->barrier().wait();
}

double Pipeline::Execution::run_step(TimesOf times) {
  times_ = times;
  if (!c10::GradMode::is_enabled())
    throw UsageError("a step of the pipeline '{}' without gradients (NoGradGuard): evaluate() is "
                     "for that",
                     group_->name());
  return unless_over([&] { return step(); });
}

double Pipeline::Execution::evaluate() {
  const c10::NoGradGuard no_grad;
  const std::vector<Span> spans = spans_;
  const int most_live = most_live_;
  const double loss = unless_over([&] { return forwards(); });
  spans_ = spans;
  most_live_ = most_live;
  return loss;
}

void Pipeline::Execution::expect_kinds(std::vector<std::int64_t> kinds) {
  if (!kinds.empty() && kinds.size() != static_cast<std::size_t>(schedule_.num_micro_batches))
    throw UsageError("{} kinds of micro-batches for the schedule '{}', which has {} of them: give "
                     "one for each, or none where all are alike",
                     kinds.size(), schedule_.name, schedule_.num_micro_batches);
  channels_.expect_kinds(std::move(kinds));
}

// An exception ends the pipeline on all ranks, as they would wait for this one.
double Pipeline::Execution::unless_over(const std::function<double()>& pass) {
  if (!over_.empty())
    throw UsageError("the pipeline '{}' is over: {}. Make another", group_->name(), over_);
  try {
    return pass();
  } catch (const CommError& error) {
    end(error.what());
    throw;
  } catch (const c10::Error& error) {
    end(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    end(error.what());
    throw;
  } catch (...) {
    end("something that is no std::exception");
    throw;
  }
}

void Pipeline::Execution::end(const std::string& reason) {
  // An error from another rank already says where it began.
  constexpr std::string_view kBegins = "a rank of the pipeline could not go on";
  over_ = reason.find(kBegins) != std::string::npos
              ? reason
              : fmt::format("{} with {}: rank {} says: {}", kBegins, under_way_, group_->rank(),
                            reason);
  group_->abort(over_);
  channels_.abort(over_);
  tied_.abort(over_);
  live_.clear();
  handed_over_.clear();
  handed_back_.clear();
  loss_.abort();
}

double Pipeline::Execution::step() {
  loss_.begin();
  spans_.clear();
  most_live_ = 0;
  tied_.put_aside();
  for (const Action& action : schedule_.actions[static_cast<std::size_t>(group_->rank())])
    run(action);
  finish_sends();
  under_way_ = "the sum of tied gradients";
  tied_.sum();
  LOCKSTEP_CHECK(live_.empty() && handed_over_.empty() && handed_back_.empty());
  return loss_of_all_ranks();
}

double Pipeline::Execution::forwards() {
  loss_.begin();
  for (const Action& action : schedule_.actions[static_cast<std::size_t>(group_->rank())]) {
    if (action.kind != ActionKind::forward && action.kind != ActionKind::send_activation &&
        action.kind != ActionKind::receive_activation)
      continue;
    run(action);
    // Without backward, a result is not needed any more once the next stage has it.
    const bool sent = is_sent(schedule_, action.stage, action.stage + 1);
    if (action.kind == (sent ? ActionKind::send_activation : ActionKind::forward))
      live_.erase({action.stage, action.micro_batch});
  }
  finish_sends();
  return loss_of_all_ranks();
}

void Pipeline::Execution::finish_sends() {
  under_way_ = "the last of what it sends";
  channels_.finish_sends();
}

void Pipeline::Execution::run(const Action& action) {
  under_way_ = to_text(action);
  const Key key{action.stage, action.micro_batch};
  switch (action.kind) {
    case ActionKind::send_activation:
      return channels_.send_activations(action.stage, action.micro_batch, live_.at(key).outputs);
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

void Pipeline::Execution::forward(const Action& action) {
  const Key key{action.stage, action.micro_batch};
  Live live{.inputs = inputs_of(action)};
  const double start = time_now();
  live.outputs = stages_.at(action.stage).forward(action.micro_batch, entered(live.inputs));
  check_outputs(action.stage, live.outputs);
  if (is_last(action.stage)) {
    if (live.outputs.size() != 1 || live.outputs[0].numel() != 1)
      throw UsageError("the last stage of the pipeline returned {}: it must be one number, the "
                       "loss summed over the micro-batch",
                       shape_of(live.outputs).text());
    loss_.add(live.outputs[0]);
  } else if (is_mine(action.stage + 1)) {
    handed_over_[{action.stage + 1, action.micro_batch}] = leaves_of(live.outputs);
  }
  spans_.push_back({start, time_now(), action});
  live_[key] = std::move(live);
  most_live_ = std::max(most_live_, static_cast<int>(live_.size()));
}

std::vector<at::Tensor> Pipeline::Execution::inputs_of(const Action& action) {
  if (action.stage == 0) return {};
  if (!is_mine(action.stage - 1))
    return channels_.receive_activations(action.stage, action.micro_batch);
  auto found = handed_over_.extract({action.stage, action.micro_batch});
  return std::move(found.mapped());
}

std::vector<at::Tensor> Pipeline::Execution::output_gradients_of(const Action& action) {
  if (is_last(action.stage)) return {at::Tensor()};
  if (!is_mine(action.stage + 1))
    return channels_.receive_gradients(action.stage, action.micro_batch);
  auto found = handed_back_.extract({action.stage, action.micro_batch});
  return std::move(found.mapped());
}

void Pipeline::Execution::backward(const Action& action) {
  const Key key{action.stage, action.micro_batch};
  const std::vector<at::Tensor> gradients = output_gradients_of(action);
  Live& live = live_.at(key);
  const double start = time_now();
  if (action.kind == ActionKind::backward)
    backward_whole(live.outputs, gradients);
  else
    live.weight_half = splits_.at(action.stage).backward_input(live.outputs, gradients);
  live.outputs.clear();
  live.weights_done = action.kind == ActionKind::backward;
  spans_.push_back({start, time_now(), action});
  if (is_sent(schedule_, action.stage, action.stage - 1)) return;
  if (action.stage > 0)
    handed_back_[{action.stage - 1, action.micro_batch}] = gradients_of(live.inputs);
  live.inputs.clear();
  live.gradient_passed_on = true;
  erase_if_done(action);
}

void Pipeline::Execution::backward_weight(const Action& action) {
  Live& live = live_.at({action.stage, action.micro_batch});
  const double start = time_now();
  live.weight_half.run();
  live.weights_done = true;
  spans_.push_back({start, time_now(), action});
  erase_if_done(action);
}

double Pipeline::Execution::time_now() const {
  if (times_ == TimesOf::work_done && !options_.device.is_cpu()) {
    const c10::impl::VirtualGuardImpl device(options_.device.type());
    device.synchronizeStream(device.getStream(options_.device));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Pipeline::Execution::erase_if_done(const Action& action) {
  const auto found = live_.find({action.stage, action.micro_batch});
  if (found->second.gradient_passed_on && found->second.weights_done) live_.erase(found);
}

void Pipeline::Execution::check_outputs(int stage, const std::vector<at::Tensor>& outputs) const {
  for (const at::Tensor& output : outputs) {
    if (!output.defined())
      throw UsageError("stage {} of the pipeline returned a tensor that is not defined: leave it "
                       "out, on all micro-batches",
                       stage);
    if (output.device().type() != options_.device.type())
      throw UsageError("stage {} of the pipeline returned a tensor on {}, and the pipeline is on "
                       "{}: move it there, or set PipelineOptions::device",
                       stage, output.device().str(), options_.device.str());
  }
}

// All processes of a host share its clock, whatever backend they use.
bool Pipeline::Execution::on_one_host() const {
  const at::Tensor mine =
      at::tensor({static_cast<std::int64_t>(hash_text(host_identity()))}, at::kLong);
  const at::Tensor all = at::empty({group_->size()}, at::kLong);
  group_->all_gather(all, mine).wait();
  return all.eq(mine).all().item<bool>();
}

Timeline Pipeline::Execution::timeline() const {
  std::vector<at::Tensor> all;  // for each rank [2 · spans]: starts and ends
  Timeline timeline;
  for (const std::vector<Action>& actions : schedule_.actions) {
    std::vector<Span>& spans = timeline.ranks.emplace_back();
    for (const Action& action : actions)
      if (!is_transfer(action.kind)) spans.push_back({0, 0, action});
    all.push_back(at::empty({2 * static_cast<std::int64_t>(spans.size())}, at::kDouble));
  }
  if (spans_.size() != timeline.ranks[static_cast<std::size_t>(group_->rank())].size())
    throw UsageError("there is no timeline before the first step of a pipeline");
  const bool one_host = timeline.one_clock = on_one_host();
  std::vector<double> mine;
  for (const Span& span : spans_) {
    const double origin = one_host ? 0 : spans_.front().start;
    mine.insert(mine.end(), {span.start - origin, span.end - origin});
  }
  group_->all_gather(all, at::tensor(mine, at::kDouble)).wait();
  double first = one_host ? std::numeric_limits<double>::max() : 0;
  for (const at::Tensor& one : all)
    if (one_host) first = std::min(first, one.min().item<double>());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const double* next = all[rank].data_ptr<double>();
    for (Span& span : timeline.ranks[rank]) {
      span.start = *next++ - first;
      span.end = *next++ - first;
    }
  }
  return timeline;
}

double Pipeline::Execution::loss_of_all_ranks() {
  under_way_ = "the loss of the last stage";
  return loss_.of_all_ranks();
}

Pipeline::Pipeline(Schedule schedule, std::map<int, Stage> stages,
                   const std::shared_ptr<comm::Communicator>& group, PipelineOptions options)
    : execution_(std::make_unique<Execution>(std::move(schedule), std::move(stages), group,
                                             std::move(options))) {}

Pipeline::~Pipeline() = default;

const Schedule& Pipeline::schedule() const { return execution_->schedule(); }
void Pipeline::expect_kinds(std::vector<std::int64_t> kinds) {
  execution_->expect_kinds(std::move(kinds));
}
double Pipeline::run_step(TimesOf times) { return execution_->run_step(times); }
double Pipeline::evaluate() { return execution_->evaluate(); }
Timeline Pipeline::timeline() const { return execution_->timeline(); }
int Pipeline::most_live() const { return execution_->most_live(); }

}  // namespace lockstep::pipeline

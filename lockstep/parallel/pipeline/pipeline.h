// Runs a model that is cut into stages, with any schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/messages.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>
#include <lockstep/parallel/pipeline/split_backward.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// Which times of a step are measured on a GPU. On a CPU both are the same.
enum class TimesOf : std::uint8_t {
  work_asked_for,  // when the host had launched the work; this costs nothing
  work_done,       // when the work was done: the host waits for each action
};

// Every rank of the group makes one, with the same schedule and its own stages, and calls
// run_step() together with the others.
//
// Gradients are added to those of the parameters as by plain backward passes, in the order in which
// the schedule has a rank's micro-batches. They are the sum over micro-batches, and the caller
// divides them by the number of samples. If gradients are also summed over other ranks, that has to
// be switched off for the step (no_sync).
//
// Ownership: keeps the stages; makes groups of its own, and does not use the caller's afterwards.
// Threading: one thread at a time. Failure: UsageError on every rank for a schedule that check()
// refuses, that has another number of ranks than the group, that differs between ranks, or that has
// other stages on a rank than were given there. If a stage throws, its rank throws the same, and
// the others a CommError with its text, at the latest in their next call. The pipeline is then over
// on all ranks, and gradients may be incomplete: make another.
class Pipeline {
 public:
  Pipeline(Schedule schedule, std::map<int, Stage> stages,
           const std::shared_ptr<comm::Communicator>& group, PipelineOptions options = {});
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  const Schedule& schedule() const { return schedule_; }

  // A kind is any number; micro-batches of one kind have the same shapes between stages, which are
  // sent once for each kind. Sets the kinds for all passes from now on, the same on every rank: one
  // for each micro-batch, or an empty list if all are alike, which is the default.
  void expect_kinds(std::vector<std::int64_t> kinds);

  // Forward and backward of every micro-batch. Returns the sum of their losses, on every rank, when
  // this rank's own work is done. Other ranks may be behind; the next step may begin all the same.
  double run_step(TimesOf times = TimesOf::work_asked_for);
  // Forward alone, without gradients; most_live() and timeline() stay those of the last step.
  double evaluate();

  // When each rank computed which action in the last step, in seconds. If ranks are on several
  // hosts, whose clocks differ, each rank's times count from its own start. Every rank calls it.
  Timeline timeline() const;
  // The most forwards whose activations this rank kept at once in the last step.
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

}  // namespace lockstep::pipeline

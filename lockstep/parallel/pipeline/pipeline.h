// Runs a model that is cut into stages, by any schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/channels.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>
#include <lockstep/parallel/pipeline/split_backward.h>
#include <lockstep/parallel/pipeline/stage.h>
#include <lockstep/parallel/pipeline/step_loss.h>
#include <lockstep/parallel/pipeline/tied_gradients.h>

namespace lockstep::pipeline {

// What the times of a step are of, on a GPU; elsewhere they are the same.
enum class TimesOf : std::uint8_t {
  work_asked_for,  // when the host had asked for it, which costs nothing
  work_done,       // when it was done: the host waits for each action
};

// Every rank of the group makes one, with the same schedule and its own stages, and calls
// run_step() together with the others.
//
// Gradients are added to the parameters' as those of plain backward passes are, in the order in
// which the schedule has a rank's micro-batches: the sum over micro-batches, to be divided by their
// samples. Where gradients are summed over further ranks, that is to be off meanwhile (no_sync).
//
// Ownership: keeps the stages; makes groups of its own, and leaves the caller's in peace.
// Threading: one thread at a time. Failure: UsageError on every rank for a schedule that check()
// refuses, that is not for the group's number of ranks, that differs between ranks, or that has
// other stages on a rank than are given there. What a stage throws, on its rank; the others get a
// CommError that has its text, those that were done with the step in their next call. The pipeline
// is over then, on all ranks, and gradients may be half of what they should be: make another.
class Pipeline {
 public:
  Pipeline(Schedule schedule, std::map<int, Stage> stages,
           const std::shared_ptr<comm::Communicator>& group, PipelineOptions options = {});
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  const Schedule& schedule() const { return schedule_; }

  // Micro-batches of one kind, which is any number, have the same shapes between stages; of each
  // kind these are told once, with the first of them. For passes from now on, the same on every
  // rank: one for each micro-batch, or none where all are alike, as before the first call.
  void expect_kinds(std::vector<std::int64_t> kinds);

  // Forward and backward of every micro-batch. Returns the sum of their losses, on every rank,
  // when this rank's own work is done: others may be behind, and it may begin the next step.
  double run_step(TimesOf times = TimesOf::work_asked_for);
  // Forward alone, without gradients; most_live() and timeline() stay those of the last step.
  double evaluate();

  // When all ranks computed what in the last step, in seconds; where they are on several hosts,
  // whose clocks differ, each from its own start. Every rank calls it.
  Timeline timeline() const;
  // The most forwards of stages whose activations were kept at once in the last step.
  int most_live() const { return most_live_; }

 private:
  using Key = std::pair<int, int>;  // stage, micro-batch
  struct Live {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    WeightHalf weight_half;
    bool gradient_passed_on = false;  // or there is nobody to pass it to
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
  std::string under_way_;  // what was begun last
  std::string over_;       // why it is, empty where it is not
};

}  // namespace lockstep::pipeline

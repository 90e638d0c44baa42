// Runs a model that is cut into stages, with any schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>
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
  ~Pipeline();

  const Schedule& schedule() const;

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
  int most_live() const;

 private:
  class Execution;
  std::unique_ptr<Execution> execution_;
};

}  // namespace lockstep::pipeline

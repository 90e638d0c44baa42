// The loss of a step, which the rank of the last stage computes and all are to know.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::pipeline {

// It goes from that rank to each of the others as soon as it is known, rather than through a sum
// over all ranks, in which each would wait for the last: when a rank's own work is done, the loss
// is there, and the next step can begin.
//
// Ownership: shares the group. Threading: one thread at a time. Failure: CommError from the group's
// calls. Who destroys it waits until the others have the last one.
class StepLoss {
 public:
  // `rank` has the last stage. Every rank of the group makes one, and calls begin() and
  // of_all_ranks() in each step; that rank add() for each micro-batch, too.
  StepLoss(std::shared_ptr<comm::Communicator> group, int rank, int num_micro_batches,
           c10::Device device);
  ~StepLoss();
  StepLoss(const StepLoss&) = delete;
  StepLoss& operator=(const StepLoss&) = delete;

  void begin();
  void add(const at::Tensor& loss);
  double of_all_ranks();
  // After the group's.
  void abort() { telling_ = {}; }

 private:
  void tell();

  std::shared_ptr<comm::Communicator> group_;
  int rank_;
  int num_micro_batches_;
  c10::Device device_;  // of the stages
  at::Tensor sum_;      // of the step so far, in double
  int num_added_ = 0;
  bool is_told_ = false;
  comm::Work telling_;
};

}  // namespace lockstep::pipeline

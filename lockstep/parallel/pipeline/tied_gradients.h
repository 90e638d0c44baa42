// One gradient for a parameter that stages on different ranks share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// Ownership: shares the parameters, has a group for the ranks of each. Threading: one thread at a
// time. Failure: CommError from the groups' calls.
class TiedGradients {
 public:
  // Every rank of the group makes it, with the same stages.
  TiedGradients(std::vector<TiedParameter> tied, const Schedule& schedule,
                comm::Communicator& group);

  // Before a step: puts aside what is there from steps before, which has been summed.
  void put_aside();
  // After it: sums what the ranks have, and adds it to what was put aside.
  void sum();
  void abort(const std::string& reason);

 private:
  struct Tied {
    at::Tensor parameter;
    std::shared_ptr<comm::Communicator> group;
    at::Tensor before;
  };
  std::vector<Tied> tied_;  // those that this rank shares with another
};

}  // namespace lockstep::pipeline

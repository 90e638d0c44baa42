// Runs a model on one process as the first rank of many would run it, to see what a plan costs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/tensor/parallelize_module.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

// The first rank of a group that has no others. Calls send nothing: gathers repeat this rank's part
// for every rank, and sums are this rank's. Shapes are those of a real group, values are not.
//
// Threading: as any group. Failure: UsageError for calls that plans never make.
class RehearsalGroup final : public comm::Communicator {
 public:
  explicit RehearsalGroup(int num_ranks);

  std::string backend() const override { return "rehearsal"; }
  bool canonical_order() const override { return false; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return {}; }

  struct Calls {
    std::int64_t sums = 0;
    std::int64_t summed_bytes = 0;
    std::int64_t gathered_bytes = 0;  // of whole tensors
  };
  const Calls& calls() const { return calls_; }
  void forget_calls() { calls_ = {}; }

 private:
  std::shared_ptr<comm::PendingCall> do_start(comm::Call call) override;
  std::shared_ptr<Communicator> do_split(const comm::SplitRequest& request,
                                         Deadline deadline) override;
  void do_abort(const std::string&) override {}
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void do_check(comm::Operation, const at::Tensor&) const override {}

  Calls calls_;
};

// The gathers and calls that a step made with the layers of a plan.
struct Rehearsed {
  std::vector<Gathered> gathers;
  RehearsalGroup::Calls calls;
  std::vector<LayerUse> uses;
  std::int64_t parameter_bytes = 0;  // of a rank
};

// Cuts the model by the plan over `num_ranks` ranks that are not there, runs the step, and backward
// from what it returns; then puts the model back as it was: parameters, gradients, buffers, and the
// default generators. An empty plan is allowed.
//
// Failure: UsageError for a plan that parallelize_module() refuses; what the step throws. The model
// is put back all the same.
Rehearsed rehearse(torch::nn::Module& model, const Plan& plan, int num_ranks,
                   const std::function<at::Tensor()>& step);

// Why parallelize_module() would refuse the plan; empty if it would not.
std::string fault_of_plan(torch::nn::Module& model, const Plan& plan, int num_ranks);

}  // namespace lockstep::tensor

// Proposes a tensor plan for a plain torch::nn model, and says what a plan costs, before training.
//
//   const auto step = [&] { return loss_of(model->forward(batch.input), batch.target); };
//   std::cout << lockstep::tensor::suggest_tensor_plan(*model, 4, step).text();
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/parallel/tensor/parallelize_module.h>

namespace lockstep::tensor {

// A step of training as a program writes it, on a small batch: returns a loss, whose backward is
// run, too.
using TracedStep = std::function<at::Tensor()>;

// The traffic of a step on each rank, forward and backward together, and the memory of the weights.
struct PlanCost {
  int num_ranks = 1;
  // Tensors that operators put together because they need all of them: empty if the plan suits the
  // model. For each, autograd takes parts again in backward, which moves nothing.
  std::vector<Gathered> gathers;
  std::int64_t sums = 0;  // calls
  std::int64_t summed_bytes = 0;
  // Gradients of activations that every rank has whole, but uses a part of. They are put together
  // in backward.
  std::int64_t gathered_gradient_bytes = 0;
  std::int64_t parameter_bytes = 0;
  std::int64_t whole_parameter_bytes = 0;  // of the model in one process

  // A few lines.
  std::string text() const;
};

// Runs the step on this process alone, as one of `num_ranks` ranks with this plan would run it, and
// counts. Values are not those of the model, but shapes and operators are. No communication. The
// model is as before afterwards: weights, gradients, buffers, and random numbers.
//
// Failure: UsageError for a plan that parallelize_module() refuses; what the step throws.
PlanCost cost_of_plan(torch::nn::Module& model, const Plan& plan, int num_ranks,
                      const TracedStep& step);

struct SuggestedPlan {
  Plan plan;  // empty if nothing can be cut
  PlanCost cost;

  // A layer that stays whole.
  struct Whole {
    std::string layer;
    std::string reason;
  };
  std::vector<Whole> whole;

  // The plan as the config has it ("tensor_plan"), its cost, and what stays whole.
  std::string text() const;
};

// Proposes a plan that gathers nothing: MultiheadAttention by heads; each Linear whose output goes
// to another one by columns, and the other by rows; queries, keys and values of one Linear; and
// embeddings by tokens, if the table is larger than what a step looks up. A Linear that ends in a
// loss over its outputs is cut by columns, too. The step is run several times, as in
// cost_of_plan().
//
// Failure: UsageError for fewer than two ranks; what the step throws.
SuggestedPlan suggest_tensor_plan(torch::nn::Module& model, int num_ranks, const TracedStep& step);

}  // namespace lockstep::tensor

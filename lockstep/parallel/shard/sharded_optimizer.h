// An optimizer that steps on this rank's part of every parameter.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep::shard {

// The model whose parts it steps on, which outlives it.
struct SteppedModel {
  struct Member {
    std::size_t unit = 0;
    std::size_t member = 0;
  };

  std::string name;
  std::span<const std::unique_ptr<FlatUnit>> units;
  // The ranks that have the other parts.
  std::shared_ptr<comm::Communicator> group;
  // This rank's part of a parameter's gradient, flat; undefined where it has none.
  std::function<at::Tensor(std::size_t unit, std::size_t member)> gradient;
  // Leaves these gradients undefined.
  std::function<void(std::span<const Member> members)> drop_gradients;
  // The parts have changed: parameters that are there have to be brought up to date.
  std::function<void()> after_step;
};

// The groups hold the model's own parameters, whole; UsageError for any other, and for a trained
// one that is cut but not the model's. Its state is that of the parts, under the parameters' names.
std::unique_ptr<optim::Optimizer> make_sharded_optimizer(SteppedModel model,
                                                         const optim::OptimizerOptions& options,
                                                         std::vector<optim::ParameterGroup> groups);

// Gathers anew what is always there, after a step; autograd notices a backward that comes too late.
void refresh(std::span<const std::unique_ptr<FlatUnit>> units);

}  // namespace lockstep::shard

// How a model is spread over the ranks of a tensor and a context axis, kept apart from its math.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/nn/context_parallel/context_parallel.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>

namespace lockstep::models {

struct ModelAxes {
  // Ranks that have a part of each layer, and the same sequences; null if layers are whole.
  std::shared_ptr<nn::TensorAxis> tensor;
  // Ranks that have a part of each sequence; null if sequences are whole.
  std::shared_ptr<comm::Communicator> context;
  nn::ContextAlgorithm context_algorithm = nn::ContextAlgorithm::ring;
  nn::SplitKind context_split = nn::SplitKind::zigzag;

  // The positions of a sequence that this rank attends from, and those that it has between layers.
  struct Positions {
    std::vector<mesh::Interval> attended;
    std::vector<mesh::Interval> between;
  };
  // UsageError, with the numbers, for a length that cannot be split this way.
  Positions positions(std::int64_t length) const;
  // This rank's part of [batch, length].
  at::Tensor attended_part(const at::Tensor& tokens) const;

  bool whole_sequences() const {
    return (context == nullptr || context->size() == 1) &&
           (tensor == nullptr || tensor->size() == 1 || !tensor->by_positions());
  }
};

// The layers of such a model that are cut over a tensor axis.
nn::TensorPlan tensor_plan(const ModelConfig& config);

}  // namespace lockstep::models

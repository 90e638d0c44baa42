// A model in numbers: how many parameters it has, which of them are gathered together, and what a
// step does to memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace lockstep::plan {

struct ModelSizes {
  // The units that shard::plan_units() cuts a module into.
  struct Unit {
    std::int64_t num_elements = 0;
    std::int64_t element_bytes = 4;
    bool trained = true;

    std::int64_t bytes() const { return num_elements * element_bytes; }
  };
  // Distinct ones, in the model's order.
  struct Parameter {
    std::int64_t num_elements = 0;
    std::size_t unit = 0;
    std::int64_t matrix_rows = 0;  // of a hidden layer's weight (optim::is_hidden_matrix); else 0
  };

  std::vector<Unit> units;
  std::vector<Parameter> parameters;
  std::int64_t buffer_bytes = 0;  // running statistics, tables

  std::int64_t num_elements() const;
  std::int64_t num_trained() const;
  std::int64_t largest_unit_bytes() const;
};

// A parameter of a model that is made of equal blocks.
struct PlacedParameter {
  std::int64_t num_elements = 0;
  std::optional<std::size_t> block;  // none: an embedding, a head
  std::int64_t matrix_rows = 0;      // as ModelSizes::Parameter has it
};

// The units that shard::plan_units() cuts such a model into by default: one for each block where
// there are two or more, and one for all other parameters.
ModelSizes sizes_of_blocks(std::span<const PlacedParameter> parameters);

// How the forward and backward pass of one micro-batch use memory, in order, on one rank that holds
// the whole model. It is measured on a module, or worked out from a model's sizes. It leaves
// out parameters and complete gradients: strategies differ in where these lie, and for how long.
struct StepTrace {
  enum class Kind : std::uint8_t {
    use,       // an operator reads a parameter
    gradient,  // a parameter's gradient is complete
  };
  struct Event {
    Kind kind = Kind::use;
    std::size_t parameter = 0;  // its number in ModelSizes
    // The most at once since the event before. It counts a gradient until it is complete.
    std::int64_t peak_bytes = 0;
  };

  std::vector<Event> events;
  std::int64_t peak_bytes_after = 0;  // the last event
  std::int64_t saved_bytes = 0;       // between forward and backward

  // The most at once in the whole step.
  std::int64_t peak_bytes() const;
};

// Where a model computes, as far as memory goes. On the CPU our own kernels compute in fp32, and
// save less for backward than LibTorch's; and gradients are summed over ranks where autograd put
// them, whereas on a GPU they lie in buckets.
enum class Device : std::uint8_t { cpu, gpu };

}  // namespace lockstep::plan

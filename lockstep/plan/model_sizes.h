// A model in numbers: how many parameters it has, and which of them are gathered together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace lockstep::plan {

struct ModelSizes {
  // What shard::plan_units() makes of a module.
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

// The units that shard::plan_units() makes of such a model by default: its blocks where there are
// two or more, and what is left, put together.
ModelSizes sizes_of_blocks(std::span<const PlacedParameter> parameters);

}  // namespace lockstep::plan

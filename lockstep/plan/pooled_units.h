// The memory that comes and goes with units, by the rules of those that move them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <lockstep/plan/model_sizes.h>
#include <lockstep/plan/step_trace.h>

namespace lockstep::plan {

// Of each unit, whether it is moved, and the bytes of it when it is whole on a rank.
struct MovedUnit {
  bool moved = false;
  std::int64_t bytes = 0;
};

// What shard::ParameterGatherer holds at most for units that are gathered when they are used.
std::int64_t peak_of_gathered(const ModelSizes& model, const StepTrace& trace,
                              std::span<const MovedUnit> units, std::int64_t max_live_units,
                              std::int64_t limit_bytes);

// What shard::GradientSharder holds at most for gradients that are collected or on their way.
std::int64_t peak_of_gradients(const ModelSizes& model, const StepTrace& trace,
                               std::span<const MovedUnit> units, std::int64_t limit_bytes);

}  // namespace lockstep::plan

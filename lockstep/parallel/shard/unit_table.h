// What people see of a sharded model's units.
#pragma once

#include <memory>
#include <span>
#include <string>

#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep::shard {

std::int64_t count_parameters(std::span<const std::unique_ptr<FlatUnit>> units);

// A line for each unit: its name, how many parameters and elements, where they are between steps
// and what a rank holds; then all of them together.
std::string describe_units(std::span<const std::unique_ptr<FlatUnit>> units);

}  // namespace lockstep::shard

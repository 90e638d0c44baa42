#include <lockstep/plan/model_sizes.h>

#include <algorithm>
#include <map>

#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::plan {

std::int64_t ModelSizes::num_elements() const {
  std::int64_t total = 0;
  for (const Unit& unit : units) total += unit.num_elements;
  return total;
}

std::int64_t ModelSizes::num_trained() const {
  std::int64_t total = 0;
  for (const Unit& unit : units)
    if (unit.trained) total += unit.num_elements;
  return total;
}

std::int64_t ModelSizes::largest_unit_bytes() const {
  std::int64_t largest = 0;
  for (const Unit& unit : units) largest = std::max(largest, unit.bytes());
  return largest;
}

ModelSizes sizes_of_blocks(std::span<const PlacedParameter> parameters) {
  std::map<std::size_t, std::int64_t> blocks;
  for (const PlacedParameter& parameter : parameters)
    if (parameter.block) blocks[*parameter.block] += parameter.num_elements;
  const bool are_units = blocks.size() >= 2;
  std::int64_t largest = 0;
  std::map<std::size_t, std::size_t> unit_of_block;  // counted from the first block's
  if (are_units)
    for (const auto& [block, size] : blocks) {
      largest = std::max(largest, size);
      unit_of_block.emplace(block, unit_of_block.size());
    }
  const auto is_left_over = [&](const PlacedParameter& parameter) {
    return !are_units || !parameter.block;
  };

  std::vector<std::int64_t> left_over;
  for (const PlacedParameter& parameter : parameters)
    if (is_left_over(parameter)) left_over.push_back(parameter.num_elements);
  const std::vector<std::size_t> groups = shard::group_left_over(left_over, largest);
  const std::size_t num_groups = groups.empty() ? 0 : groups.back() + 1;

  ModelSizes sizes;
  sizes.units.resize(num_groups + (are_units ? blocks.size() : 0));
  auto next_group = groups.begin();
  for (const PlacedParameter& parameter : parameters) {
    const std::size_t unit =
        is_left_over(parameter) ? *next_group++ : num_groups + unit_of_block.at(*parameter.block);
    sizes.units[unit].num_elements += parameter.num_elements;
    sizes.parameters.push_back({.num_elements = parameter.num_elements,
                                .unit = unit,
                                .matrix_rows = parameter.matrix_rows});
  }
  return sizes;
}

std::int64_t StepTrace::peak_bytes() const {
  std::int64_t peak = peak_bytes_after;
  for (const Event& event : events) peak = std::max(peak, event.peak_bytes);
  return peak;
}

}  // namespace lockstep::plan

// Which parameters are gathered and let go together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/base/held_module.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::shard {

// A unit before it has memory: parameters of one dtype on one device, all of them trained or none,
// all of them to keep their type in mixed precision or none.
struct PlannedUnit {
  std::string name;
  std::vector<NamedTensor> parameters;
  bool keeps_type = false;

  std::int64_t num_elements() const;
};

// How units are chosen. Whatever is chosen, a parameter is in one unit, shared weights in the first
// that has them, and the answer does not depend on it: units decide memory and speed alone.
struct UnitPolicy {
  // Whether a module becomes a unit, with all that is inside of it; modules inside of a unit are
  // not asked. Where it is empty, units are the children of a ModuleList or Sequential that has two
  // or more of one type, as the blocks of a transformer are.
  std::function<bool(const std::string& name, const torch::nn::Module& module)> is_unit;
  // A module that is_unit() takes but that has fewer parameters is divided among its children
  // instead: FSDP's size-based policy.
  std::int64_t min_num_params = 0;
};

// Modules of these types, or of what these hold: FSDP's transformer policy.
template <typename... Modules>
UnitPolicy units_of_types() {
  static_assert((std::is_base_of_v<torch::nn::Module, held_module<Modules>> && ...),
                "these are types of modules, or of their holders (TORCH_MODULE)");
  return {.is_unit = [](const std::string&, const torch::nn::Module& module) {
    return ((dynamic_cast<const held_module<Modules>*>(&module) != nullptr) || ...);
  }};
}

// Modules of so many parameters or more, as deep inside as there are any.
UnitPolicy units_of_size(std::int64_t min_num_params);

// The modules of these names ("blocks.0", "head"). UsageError, when units are planned, where the
// model has none of a name.
UnitPolicy units_named(std::vector<std::string> names);

// The whole model as one.
UnitPolicy one_unit();

// Parameters that keep their type, by their TensorImpl.
using KeepType = std::unordered_set<const void*>;

// The model's units. Parameters outside of every such module go, in the model's order, into units
// of at most the largest one's size, or an eighth of the model where there is none.
std::vector<PlannedUnit> plan_units(const torch::nn::Module& module, const UnitPolicy& policy,
                                    const KeepType& keep_type = {});

}  // namespace lockstep::shard

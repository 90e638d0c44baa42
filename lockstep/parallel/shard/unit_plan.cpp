#include <lockstep/parallel/shard/unit_plan.h>

#include <algorithm>
#include <map>
#include <set>
#include <typeindex>
#include <unordered_set>

#include <spdlog/fmt/ranges.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

namespace {

using torch::nn::Module;

bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::int64_t count_elements(const Module& module) {
  std::unordered_set<const void*> seen;
  std::int64_t total = 0;
  for (const auto& item : data_parallel::held_parameters(module))
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) total += item.value().numel();
  return total;
}

// Walks a model and gathers the parameters of its units, each once.
class Planner {
 public:
  explicit Planner(const UnitPolicy& policy) : policy_(policy) {}

  void visit(const std::string& name, const Module& module) {
    if (policy_.is_unit ? takes(name, module) : false) {
      add_unit(name, module);
      return;
    }
    leave_over(name, data_parallel::held_parameters(module, /*recurse=*/false));
    std::map<std::type_index, int> siblings;
    for (const auto& child : module.named_children())
      if (!child.value()->parameters().empty()) ++siblings[typeid(*child.value())];
    for (const auto& child : module.named_children()) {
      const Module& inner = *child.value();
      const std::string inner_name = joined(name, child.key());
      if (!policy_.is_unit && is_container(module) && siblings[typeid(inner)] >= 2)
        add_unit(inner_name, inner);
      else
        visit(inner_name, inner);
    }
  }

  std::vector<PlannedUnit> finish() {
    std::int64_t largest = 0;
    for (const PlannedUnit& unit : units_) largest = std::max(largest, unit.num_elements());
    std::vector<std::int64_t> sizes;
    for (const NamedTensor& parameter : left_over_) sizes.push_back(parameter.tensor.numel());
    const std::vector<std::size_t> groups = group_left_over(sizes, largest);
    std::vector<PlannedUnit> rest;
    for (std::size_t i = 0; i < left_over_.size(); ++i) {
      if (groups[i] == rest.size()) rest.push_back({left_over_[i].name, {}});
      if (!rest.back().parameters.empty())
        rest.back().name = rest.back().parameters.front().name + " …";
      rest.back().parameters.push_back(std::move(left_over_[i]));
    }
    units_.insert(units_.begin(), std::make_move_iterator(rest.begin()),
                  std::make_move_iterator(rest.end()));
    return std::move(units_);
  }

 private:
  bool takes(const std::string& name, const Module& module) const {
    return policy_.is_unit(name, module) && count_elements(module) >= policy_.min_num_params;
  }

  void add_unit(const std::string& name, const Module& module) {
    PlannedUnit unit{name.empty() ? module.name() : name, {}};
    for (const auto& item : data_parallel::held_parameters(module))
      if (seen_.insert(item.value().unsafeGetTensorImpl()).second)
        unit.parameters.push_back({joined(name, item.key()), item.value()});
    if (!unit.parameters.empty()) units_.push_back(std::move(unit));
  }

  void leave_over(const std::string& name,
                  const torch::OrderedDict<std::string, at::Tensor>& parameters) {
    for (const auto& item : parameters)
      if (seen_.insert(item.value().unsafeGetTensorImpl()).second)
        left_over_.push_back({joined(name, item.key()), item.value()});
  }

  const UnitPolicy& policy_;
  std::unordered_set<const void*> seen_;
  std::vector<PlannedUnit> units_;
  std::vector<NamedTensor> left_over_;
};

// One memory holds one dtype on one device, and a frozen parameter has no gradient to wait for.
std::vector<PlannedUnit> divide_by_kind(PlannedUnit unit, const KeepType& keep_type) {
  std::vector<PlannedUnit> parts;
  for (NamedTensor& parameter : unit.parameters) {
    const at::Tensor& tensor = parameter.tensor;
    const bool keeps_type = keep_type.contains(tensor.unsafeGetTensorImpl());
    const auto same_kind = [&](const PlannedUnit& part) {
      const at::Tensor& first = part.parameters.front().tensor;
      return first.scalar_type() == tensor.scalar_type() && first.device() == tensor.device() &&
             first.requires_grad() == tensor.requires_grad() && part.keeps_type == keeps_type;
    };
    auto place = std::ranges::find_if(parts, same_kind);
    if (place == parts.end()) {
      std::string name = unit.name;
      if (!parts.empty())
        name += fmt::format(" ({}{})", c10::toString(tensor.scalar_type()),
                            tensor.requires_grad() ? "" : ", frozen");
      place = parts.insert(parts.end(), {name, {}, keeps_type});
    }
    place->parameters.push_back(std::move(parameter));
  }
  return parts;
}

}  // namespace

std::int64_t PlannedUnit::num_elements() const {
  std::int64_t total = 0;
  for (const NamedTensor& parameter : parameters) total += parameter.tensor.numel();
  return total;
}

UnitPolicy units_of_size(std::int64_t min_num_params) {
  // A module is taken where none of its children would be.
  return {.is_unit =
              [min_num_params](const std::string&, const Module& module) {
                return std::ranges::none_of(module.children(), [&](const auto& child) {
                  return count_elements(*child) >= min_num_params;
                });
              },
          .min_num_params = min_num_params};
}

UnitPolicy units_named(std::vector<std::string> names) {
  return {.is_unit = [names = std::set(names.begin(), names.end())](const std::string& name,
                                                                    const Module& module) {
    if (name.empty()) {
      std::set<std::string> unknown = names;
      for (const auto& item : module.named_modules()) unknown.erase(item.key());
      if (!unknown.empty())
        throw UsageError("the module '{}' has no '{}' inside of it to make a unit of",
                         module.name(), fmt::join(unknown, "', '"));
    }
    return names.contains(name);
  }};
}

UnitPolicy one_unit() {
  return {.is_unit = [](const std::string&, const Module&) { return true; }};
}

std::vector<PlannedUnit> plan_units(const Module& module, const UnitPolicy& policy,
                                    const KeepType& keep_type) {
  Planner planner(policy);
  planner.visit("", module);
  std::vector<PlannedUnit> units;
  for (PlannedUnit& unit : planner.finish())
    for (PlannedUnit& part : divide_by_kind(std::move(unit), keep_type))
      units.push_back(std::move(part));
  return units;
}

}  // namespace lockstep::shard

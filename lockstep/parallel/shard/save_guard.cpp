#include <lockstep/parallel/shard/save_guard.h>

#include <ostream>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/shard/parameter_gatherer.h>

namespace lockstep::shard {

namespace {

bool is_guard(const torch::nn::Module& module) {
  return dynamic_cast<const SaveGuard*>(&module) != nullptr;
}

}  // namespace

bool SaveGuard::is_serializable() const {
  throw UsageError(
      "torch::save() and torch::load() find nothing of a sharded model's weights, which are cut "
      "among {} ranks: write what full_state_dict() returns on the first rank, and load into the "
      "model before wrap_model(), or with load_full_state_dict()",
      num_parts_);
}

void SaveGuard::pretty_print(std::ostream& stream) const {
  stream << "cut among " << num_parts_ << (num_parts_ == 1 ? " rank" : " ranks");
}

void guard_saving(torch::nn::Module& module, int num_parts) {
  bool guarded = false;
  for (const auto& child : module.children()) {
    // Where the module is registered in two places, it has one already.
    if (is_guard(*child)) return;
    if (child->parameters().empty()) continue;
    guard_saving(*child, num_parts);
    guarded = true;
  }
  if (!guarded && !module.parameters(/*recurse=*/false).empty())
    module.register_module("sharding", std::make_shared<SaveGuard>(num_parts));
}

void refuse_sharded(const torch::nn::Module& module) {
  const auto refuse = [](const std::string& name) {
    throw UsageError("'{}' is sharded already: call wrap_model() once for a model, and not for a "
                     "part of one that was wrapped",
                     name);
  };
  for (const auto& parameter : module.named_parameters()) {
    for (const auto& owner : intercept::owners_of(parameter.value()))
      if (dynamic_cast<const ParameterGatherer*>(owner.get()) != nullptr) refuse(parameter.key());
    if (parameter.value().numel() > 0 && parameter.value().data_ptr() == nullptr)
      throw UsageError(
          "'{}' has no memory of its own, as a parameter that parallelize_module() cut "
          "over a tensor axis: such a model cannot be sharded, too",
          parameter.key());
  }
  for (const auto& part : module.modules(/*include_self=*/false))
    if (is_guard(*part)) refuse(module.name());
}

}  // namespace lockstep::shard

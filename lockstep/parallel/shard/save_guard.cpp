#include <lockstep/parallel/shard/save_guard.h>

#include <ostream>

#include <lockstep/base/error.h>
#include <lockstep/intercept/key.h>
#include <lockstep/parallel/shard/parameter_gatherer.h>

namespace lockstep::shard {

bool SaveGuard::is_serializable() const {
  throw UsageError(
      "torch::save() and torch::load() find nothing of a sharded model's weights ({}): "
      "write what full_state_dict() returns on the first rank, and load into the model "
      "before wrap_model(), or with load_full_state_dict()",
      summary_);
}

void SaveGuard::pretty_print(std::ostream& stream) const { stream << summary_; }

void refuse_sharded(const torch::nn::Module& module) {
  const auto refuse = [](const std::string& name) {
    throw UsageError("'{}' is sharded already: call wrap_model() once for a model, and not for a "
                     "part of one that was wrapped",
                     name);
  };
  for (const auto& parameter : module.named_parameters())
    for (const auto& owner : intercept::owners_of(parameter.value()))
      if (dynamic_cast<const ParameterGatherer*>(owner.get()) != nullptr) refuse(parameter.key());
  for (const auto& part : module.modules(/*include_self=*/false))
    if (dynamic_cast<const SaveGuard*>(part.get()) != nullptr) refuse(module.name());
}

}  // namespace lockstep::shard

#include <lockstep/parallel/data_parallel/save_guard.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {

namespace {

bool is_guard(const torch::nn::Module& module, const std::string& kind) {
  const auto* const guard = dynamic_cast<const SaveGuard*>(&module);
  return guard != nullptr && guard->kind() == kind;
}

}  // namespace

SaveGuard::SaveGuard(std::string kind, std::string refusal, std::string printed)
    : kind_(std::move(kind)), refusal_(std::move(refusal)), printed_(std::move(printed)) {}

bool SaveGuard::is_serializable() const { throw UsageError("{}", refusal_); }

void SaveGuard::pretty_print(std::ostream& stream) const { stream << printed_; }

void guard_saving(torch::nn::Module& module, const std::shared_ptr<SaveGuard>& guard) {
  bool guarded = false;
  for (const auto& child : module.children()) {
    // A module that is registered in two places is reached twice, and needs one guard.
    if (is_guard(*child, guard->kind())) return;
    if (child->parameters().empty()) continue;
    guard_saving(*child, guard);
    guarded = true;
  }
  if (!guarded && !module.parameters(/*recurse=*/false).empty())
    module.register_module(guard->kind(), guard);
}

bool has_save_guard(const torch::nn::Module& module, const std::string& kind) {
  return std::ranges::any_of(module.modules(/*include_self=*/false),
                             [&](const auto& part) { return is_guard(*part, kind); });
}

}  // namespace lockstep::data_parallel

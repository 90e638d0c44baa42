// Keeps torch::save() from writing a sharded model, of which it would write next to nothing.
#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

namespace lockstep::shard {

// A child that a sharded module gets: torch::save() and torch::load() ask all children whether they
// are in the file, and this one answers with a UsageError that says what to call. It has no
// parameters; printed, it says how the module is sharded.
class SaveGuard final : public torch::nn::Module {
 public:
  explicit SaveGuard(std::string summary) : summary_(std::move(summary)) {}

  bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::string summary_;
};

// The child's name.
inline constexpr const char* kSaveGuardName = "sharding";

// UsageError where a module or a part of it is sharded already, or it is part of one whose
// parameters are.
void refuse_sharded(const torch::nn::Module& module);

}  // namespace lockstep::shard

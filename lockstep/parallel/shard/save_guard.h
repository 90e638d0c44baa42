// Keeps torch::save() from writing a sharded model, of which it would write next to nothing.
#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

namespace lockstep::shard {

// A child that a sharded module gets: torch::save() and torch::load() go through all children, and
// this one throws a UsageError that says what to call. It has no parameters; printed, it says how
// the module is sharded.
class SaveGuard final : public torch::nn::Module {
 public:
  explicit SaveGuard(std::string summary) : summary_(std::move(summary)) {}

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::string summary_;
};

// The child's name.
inline constexpr const char* kSaveGuardName = "sharding";

}  // namespace lockstep::shard

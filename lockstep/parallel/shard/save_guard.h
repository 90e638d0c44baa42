// Keeps torch::save() from writing a sharded model, of which it would write next to nothing.
#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

namespace lockstep::shard {

// A child that torch::save() and torch::load() ask, as they do all children, whether it is in the
// file, and that answers with a UsageError that says what to call. It has no parameters; printed,
// it says how the module is sharded.
class SaveGuard final : public torch::nn::Module {
 public:
  explicit SaveGuard(int num_parts) : num_parts_(num_parts) {}

  bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  int num_parts_;
};

// Gives every module that holds parameters such a child, itself or somewhere below it: where it can
// be, a module that has no children of its own, whose code does not go through them.
void guard_saving(torch::nn::Module& module, int num_parts);

// UsageError where a module or a part of it is sharded already, or it is part of one whose
// parameters are.
void refuse_sharded(const torch::nn::Module& module);

}  // namespace lockstep::shard

// Keeps torch::save() and torch::load() from a model of which each rank has a part: a file would
// have that part alone, or next to nothing, without a word.
#pragma once

#include <iosfwd>
#include <memory>
#include <string>

#include <torch/nn/module.h>

namespace lockstep::data_parallel {

// A child that torch::save() and torch::load() ask, as they do all children, whether it is in the
// file, and that answers with a UsageError. It has no parameters; printed, it says how the module
// is spread.
class SaveGuard : public torch::nn::Module {
 public:
  // `kind` is the child's name. `refusal` is the error: what is spread how, and what to call
  // instead.
  SaveGuard(std::string kind, std::string refusal, std::string printed);

  const std::string& kind() const { return kind_; }

  bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::string kind_;
  std::string refusal_;
  std::string printed_;  // "cut among 4 ranks"
};

// Gives every module that holds parameters such a child, itself or somewhere below it: where it can
// be, a module that has no children of its own, whose code does not go through them. A module that
// has one of the kind already stays as it is.
void guard_saving(torch::nn::Module& module, const std::shared_ptr<SaveGuard>& guard);

// Whether a module, or one in it, has a guard of this kind.
bool has_save_guard(const torch::nn::Module& module, const std::string& kind);

}  // namespace lockstep::data_parallel

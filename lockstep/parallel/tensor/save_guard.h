// Keeps torch::save() from a model whose weights are parts.
#pragma once

#include <string>

#include <torch/nn/module.h>

namespace lockstep::tensor {

// A child that torch::save() and torch::load() ask, as they do all children, whether it is in the
// file, and that answers with a UsageError that says what to call. It has no parameters; printed,
// it says how the layer is cut.
class SaveGuard final : public torch::nn::Module {
 public:
  explicit SaveGuard(std::string cut) : cut_(std::move(cut)) {}

  bool is_serializable() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::string cut_;  // "cut by columns over 4 ranks"
};

}  // namespace lockstep::tensor

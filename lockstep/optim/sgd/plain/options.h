// Gradient descent in numbers.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

class Optimizer;
class Parts;
struct ParameterGroup;

// As torch::optim::SGD.
struct SGDOptions {
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;

  static constexpr StepKind kKind = StepKind::elementwise;
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const;
  std::vector<OptionMistake> mistakes(std::string_view type) const;
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

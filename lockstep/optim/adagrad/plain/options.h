// Adagrad (Duchi et al., 2011) in numbers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

class Optimizer;
class Parts;
struct ParameterGroup;

// As torch::optim::Adagrad: weights decay as part of the gradient.
struct AdagradOptions {
  double eps = 1e-10;
  double lr_decay = 0;

  static constexpr StepKind kKind = StepKind::elementwise;
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const { return {"sum"}; }
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

// Lion (Chen et al., 2023) in numbers.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

class Optimizer;
class Parts;
struct ParameterGroup;

// Each element moves by the learning rate, up or down; weights decay by themselves.
struct LionOptions {
  std::array<double, 2> betas = {0.9, 0.99};

  static constexpr StepKind kKind = StepKind::elementwise;
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const { return {"exp_avg"}; }
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

// LAMB (You et al., 2019) in numbers.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

class Optimizer;
class Parts;
struct ParameterGroup;

// As DeepSpeed's FusedLamb: Adam's direction with the decay in it, as long as the norm of the
// parameter by which it is multiplied allows. The bias correction is part of the learning rate.
struct LambOptions {
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  bool eps_inside_sqrt = false;
  bool bias_correction = true;
  // Bounds of the parameter's norm divided by the direction's.
  double max_coeff = 10;
  double min_coeff = 0.01;

  static constexpr StepKind kKind = StepKind::norm_per_parameter;
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const { return {"exp_avg", "exp_avg_sq"}; }
  std::vector<OptionMistake> mistakes(std::string_view type) const;
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

// AdamW, and Adam with its coupled decay, in numbers.
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

// How weights decay in Adam.
enum class AdamDecay {
  decoupled,  // by themselves: AdamW, DeepSpeed's adam_w_mode
  coupled,    // through the gradient: the first Adam
};

struct AdamWOptions {
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  AdamDecay decay = AdamDecay::decoupled;
  // Whether moments, which begin at 0, are scaled up by how little they have seen so far.
  bool bias_correction = true;

  static constexpr StepKind kKind = StepKind::elementwise;
  void describe(OptionKeys& keys);
  std::vector<std::string> state_names() const { return {"exp_avg", "exp_avg_sq"}; }
  std::vector<OptionMistake> mistakes(std::string_view type) const;
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

// The same with both moments in 8 bits: codes in blocks of kCodeBlock elements of the whole
// parameter, each with a float as its scale (optim/kernels/block_codes.h).
struct AdamW8bitOptions : AdamWOptions {
  static constexpr StepKind kKind = StepKind::blocks;
  double state_bytes() const { return 2 * (1 + 4.0 / 256); }
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

// Muon (Jordan, 2024) in numbers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

class Optimizer;
class Parts;
struct ParameterGroup;

// How far a matrix of `rows` by `columns` moves, as torch.optim.Muon names it.
enum class MuonRate : std::uint8_t {
  original,         // the learning rate times the root of rows / columns, and at least times 1
  match_rms_adamw,  // times 0.2 · the root of the larger side: an element moves as far as AdamW's
};

// As DeepSpeed's Muon: weights of hidden layers move along their momentum, whose singular values
// are all brought near 1; embeddings, the output layer, biases and norms move by AdamW. Weights
// decay by themselves.
struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  std::int64_t ns_steps = 5;  // of the Newton-Schulz iteration
  MuonRate adjust_lr_fn = MuonRate::original;
  // AdamW's.
  std::array<double, 2> betas = {0.9, 0.95};
  double eps = 1e-10;
  // Learning rates of the two kinds of parameters where a step is given `lr`; a schedule changes
  // all three in proportion. Those that are left out are what the step is given.
  std::optional<double> muon_lr;
  std::optional<double> adam_lr;
  double lr = 0;  // a config fills it in

  static constexpr StepKind kKind = StepKind::whole_matrices;
  void describe(OptionKeys& keys);
  void set_learning_rate(double rate) { lr = rate; }
  std::vector<std::string> state_names() const { return {"exp_avg", "exp_avg_sq"}; }
  std::vector<std::string> matrix_state_names() const { return {"momentum_buffer"}; }
  std::vector<OptionMistake> mistakes(std::string_view type) const;
  std::unique_ptr<Optimizer> make(std::vector<ParameterGroup> groups,
                                  std::shared_ptr<Parts> parts) const;
};

}  // namespace lockstep::optim

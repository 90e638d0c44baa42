// Parameters that an optimizer treats alike.
#pragma once

#include <vector>

#include <lockstep/optim/parameter.h>

namespace lockstep::optim {

// Selects the parameters of two dims or more that an optimizer of whole matrices, such as Muon,
// moves as matrices.
enum class MatrixRule {
  by_name,  // all but embeddings and output layers, by their names: is_hidden_matrix()
  all,
  none,
};

struct ParameterGroup {
  std::vector<NamedParameter> parameters;
  double weight_decay = 0;
  double learning_rate_factor = 1;  // of the learning rate that a step is given
  MatrixRule matrices = MatrixRule::by_name;
};

enum class DecayRule {
  matrices,    // what has two dims or more, embeddings among them; biases and norms stay free
  everything,  // as torch::optim and DeepSpeed do
};

// The parameters that decay and those that do not; at most two groups, none of them empty.
std::vector<ParameterGroup> decay_groups(std::vector<NamedParameter> parameters,
                                         double weight_decay, DecayRule rule = DecayRule::matrices);

}  // namespace lockstep::optim

// Parameters that an optimizer treats alike.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/optim/kernels/low_precision.h>
#include <lockstep/optim/parameter.h>

namespace lockstep::optim {

// Selects the parameters of two dims or more that an optimizer of whole matrices, such as Muon,
// moves as matrices.
enum class MatrixRule {
  by_name,  // all but embeddings and output layers, by their names: is_hidden_matrix()
  all,
  none,
};

// How an optimizer steps on weights that have 16 bits themselves (Half, BFloat16): it computes in
// floats, and rounds what it writes. Random bits follow from the seed, the parameter's name, its
// count of steps and the element's place in the whole parameter: not from where it is cut.
struct SixteenBits {
  Rounding rounding = Rounding::stochastic;
  bool in_state = false;  // whether the state has 16 bits, too, rounded likewise; else it is Float
  std::uint64_t seed = 0;
};

struct ParameterGroup {
  std::vector<NamedParameter> parameters;
  double weight_decay = 0;
  double learning_rate_factor = 1;  // of the learning rate that a step is given
  MatrixRule matrices = MatrixRule::by_name;
  SixteenBits sixteen_bits = {};  // of its parameters that are Half or BFloat16
  // How many elements of the whole parameter of that name come before those that are here; where it
  // is empty, parameters are whole.
  std::function<std::int64_t(const std::string& name)> elements_before = {};
};

enum class DecayRule {
  matrices,    // what has two dims or more, embeddings among them; biases and norms stay free
  everything,  // as torch::optim and DeepSpeed do
};

// The parameters that decay and those that do not; at most two groups, none of them empty.
std::vector<ParameterGroup> decay_groups(std::vector<NamedParameter> parameters,
                                         double weight_decay, DecayRule rule = DecayRule::matrices);

}  // namespace lockstep::optim

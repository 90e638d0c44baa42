// Tensors by name, as optimizers have them: a model's parameters, in groups that are treated alike,
// and saved state, which must fit what is there.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/kernels/low_precision.h>

namespace lockstep::optim {

// Shares its storage and its gradient with the model.
using NamedParameter = NamedTensor;

// UsageError where a tensor is undefined, a name stands for two parameters, or one parameter stands
// under two names, as shared weights do in torch::nn::Module::named_parameters().
void check_distinct(const std::vector<NamedParameter>& parameters);

// The gradient that backward left in `.grad()`; undefined if backward did not reach the parameter.
// UsageError for a gradient that is sparse, not of the parameter's shape, type and device, or cut
// among ranks so that it has no memory here.
at::Tensor gradient_of(const NamedParameter& parameter);

// "Float [3, 4]", for messages.
std::string type_and_shape(const at::Tensor& tensor);

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

// For each of `needed` the tensor of its name in `saved`. UsageError, with the differences, unless
// the names are the same ones and each tensor is of the needed shape and type.
std::vector<at::Tensor> match_saved_state(const std::vector<NamedTensor>& needed,
                                          const std::vector<NamedTensor>& saved);

}  // namespace lockstep::optim

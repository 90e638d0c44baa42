// Dropout that is the same in every layout: whether an element is dropped depends on the seed, the
// place of the dropout in the model, the step, the sample's place in the whole batch and the
// element's place in the sample.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::nn {

// The state of a training run that random numbers depend on. The modules of a model share it; the
// training loop sets it before each forward.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::vector<std::int64_t> rows;  // of each sample held here, its place in the batch of all ranks
  // If ranks share sequences (sequence_split.h): the positions held here, along dim 1 of the input.
  // Empty: all positions are held.
  std::vector<mesh::Interval> positions = {};
};

// The factors for x [samples, …]: 0 for an element that is dropped, else 1/(1 - p). Float, on the
// given device, with the same bits on each. With positions, x is [samples, positions, …], and these
// are the mask's values at those positions of the whole sequence.
at::Tensor dropout_mask(at::IntArrayRef sizes, const std::vector<std::int64_t>& rows,
                        std::uint64_t key, double p, const at::Device& device,
                        const std::vector<mesh::Interval>& positions = {});

namespace internal {
// The same mask, computed with LibTorch's operators alone, for devices other than the CPU.
at::Tensor dropout_mask_of_operators(at::IntArrayRef sizes, const std::vector<std::int64_t>& rows,
                                     std::uint64_t key, double p, const at::Device& device,
                                     const std::vector<mesh::Interval>& positions = {});
}  // namespace internal

// In training mode drops each element with probability p and divides the others by 1 - p; otherwise
// does nothing. Saves nothing for backward, which draws the same numbers again.
//
// Ownership: shares the state, which it only reads. Threading: forward reads the state, so no other
// thread may change it meanwhile. Failure: UsageError if p is not in [0, 1), or if the state names
// another number of samples or positions than the input has.
class DropoutImpl : public torch::nn::Module {
 public:
  // `site` is the module's place in the model: no two dropouts of a model may share one.
  DropoutImpl(double p, std::string site, std::shared_ptr<const RandomState> state);

  at::Tensor forward(const at::Tensor& x);  // [samples, …], as the result

 private:
  double p_;
  std::string site_;
  std::shared_ptr<const RandomState> state_;
};

TORCH_MODULE(Dropout);

}  // namespace lockstep::nn

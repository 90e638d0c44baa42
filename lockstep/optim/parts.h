// How an optimizer asks other ranks about parameters of which it steps on a part.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/optim/parameters.h>

namespace lockstep::optim {

// A computation on whole matrices of which each rank has a part. A matrix is the elements of a
// parameter, in row-major order.
struct WholeMatrices {
  struct Matrix {
    std::string name;  // of the parameter that it is cut as
    at::ScalarType type;
    std::vector<std::int64_t> shape;  // of the whole parameter
  };

  // This rank's part of matrix i, flat.
  std::function<at::Tensor(std::size_t i)> take;
  // Called by one rank, with the whole, which it may write to: what is given back to all. It has
  // as many elements.
  std::function<at::Tensor(std::size_t i, at::Tensor whole)> compute;
  // This rank's part of that, flat.
  std::function<void(std::size_t i, const at::Tensor& part)> give;
};

// A number of a block of a parameter, for each of several tensors that are cut as it is: of the
// block in which this rank's part begins, where other ranks have elements of it, too, and of the
// one in which it ends. 0 where it does not, or where the rank has no part.
struct BlockEdges {
  std::string name;  // of the parameter
  std::vector<float> first, last;

  // Of two ranks' numbers of a block the one of the larger magnitude; of a number and its negative
  // the positive one.
  static float joined(float one, float other);
};

// This rank's parts of parameters that are cut among ranks, in row-major order. Every rank that has
// parts of the same parameters calls the same functions with the same names in the same order.
class Parts {
 public:
  virtual ~Parts() = default;

  // The shape of the parameter of that name, of which this rank has `part`.
  virtual std::vector<std::int64_t> whole_shape(const std::string& name,
                                                const at::Tensor& part) const = 0;

  // Each of `parts` is this rank's part of a tensor that is cut as the parameter of that name is.
  // The sum of squares of each of those whole tensors, over fixed blocks (sum_of_squares.h), so
  // that its bits do not depend on where the parts are cut.
  virtual std::vector<double> sums_of_squares(const std::vector<NamedTensor>& parts) = 0;

  // Makes each number of the edges what all ranks' numbers of that block are, joined. A part that
  // lies within one block has its number in `first` or in `last`. Blocks of `block_elements`
  // elements, counted from the parameter's first.
  virtual void join_blocks(std::int64_t block_elements, std::span<BlockEdges> edges) = 0;

  // Brings each matrix to one rank, which computes, and hands its parts back. The ranks share the
  // matrices out by the work that they are.
  virtual void compute_whole(const std::vector<WholeMatrices::Matrix>& matrices,
                             const WholeMatrices& work) = 0;
};

// Parameters that are whole on this rank. Matrices are computed where they are, or on the device
// that is given.
class WholeParts final : public Parts {
 public:
  explicit WholeParts(std::optional<c10::Device> device = {}) : device_(device) {}

  std::vector<std::int64_t> whole_shape(const std::string& name,
                                        const at::Tensor& part) const override;
  std::vector<double> sums_of_squares(const std::vector<NamedTensor>& tensors) override;
  void join_blocks(std::int64_t /*block_elements*/, std::span<BlockEdges> /*edges*/) override {}
  void compute_whole(const std::vector<WholeMatrices::Matrix>& matrices,
                     const WholeMatrices& work) override;

 private:
  std::optional<c10::Device> device_;
};

}  // namespace lockstep::optim

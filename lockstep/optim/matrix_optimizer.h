// Optimizers that look at a parameter as a whole, as a matrix.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/parts.h>

namespace lockstep::optim {

// The sides of a parameter that is taken as a matrix: all dims but the first are columns.
struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// A step has three stages. The first and the last go element by element, over the memory that this
// rank has of a parameter. In between, one rank has the matrix as a whole, and no other computes
// it; without parts that is this rank. The matrices of a step are there one after the other.
//
// On the CPU, bits depend neither on where a matrix is cut nor on which rank computes it. Products
// are LibTorch's, whose bits may depend on the number of threads.
class MatrixOptimizer : public StatefulOptimizer {
 protected:
  // Every parameter is a matrix. Without `parts` all of them are whole.
  MatrixOptimizer(std::vector<ParameterGroup> groups, std::vector<std::string> state_names,
                  std::shared_ptr<Parts> parts);

 private:
  // Brings the state up to date, and writes what the matrix is made of that change() gets. See
  // ElementwiseOptimizer about the loops.
  virtual void prepare(const StepNumbers& numbers, const Stretch<float>& stretch,
                       float* prepared) const = 0;
  virtual void prepare(const StepNumbers& numbers, const Stretch<double>& stretch,
                       double* prepared) const = 0;
  // The same for a tensor that is not in this process's memory.
  virtual at::Tensor prepare(const ParameterStep& elsewhere) const = 0;

  // The direction of a step, [rows, columns], from what was prepared, which is contiguous and may
  // be written to.
  virtual at::Tensor change(at::Tensor prepared) const = 0;

  // Moves the weights along the direction.
  virtual void apply(const StepNumbers& numbers, const MatrixShape& shape,
                     const Stretch<float>& stretch, const float* direction) const = 0;
  virtual void apply(const StepNumbers& numbers, const MatrixShape& shape,
                     const Stretch<double>& stretch, const double* direction) const = 0;
  virtual void apply(const MatrixShape& shape, const ParameterStep& elsewhere,
                     const at::Tensor& direction) const = 0;

  void move(const std::vector<ParameterStep>& steps, const StepFactor& factor) final;
  at::Tensor prepared(const ParameterStep& step) const;
  void move_along(const ParameterStep& step, const MatrixShape& shape,
                  const at::Tensor& direction) const;

  std::shared_ptr<Parts> parts_;
};

}  // namespace lockstep::optim

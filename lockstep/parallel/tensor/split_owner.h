// Who computes with tensors that are cut: on parts where that gives parts of the answer, and of
// whole tensors, put together first, where it does not.
#pragma once

#include <memory>
#include <string>

#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/parallel/tensor/gather_log.h>

namespace lockstep::tensor {

// The results of any operator are those that it has of whole tensors: whole themselves, and the
// same on every rank, or cut. Every rank of the axis runs the same operators on cut tensors, in the
// same order.
//
// Ownership: kept alive by the tensors that are cut. Threading: any thread that computes; as the
// axis where something goes between ranks. Failure: UsageError for what cannot be done with a cut
// tensor; CommError from the axis.
class SplitOwner final : public intercept::Owner {
 public:
  explicit SplitOwner(std::shared_ptr<comm::Communicator> group);

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;

  const nn::TensorAxis& axis() const { return axis_; }
  GatherLog& gathers() { return gathers_; }

  // All of a tensor of this owner's, for an operator that needs it.
  at::Tensor gathered(const at::Tensor& tensor, const std::string& op);

 private:
  nn::TensorAxis axis_;
  GatherLog gathers_;
};

}  // namespace lockstep::tensor

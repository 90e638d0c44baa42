#include <lockstep/recompute/kept_tensor.h>

#include <c10/util/StringUtil.h>

#include <lockstep/base/error.h>

namespace lockstep::activations {

bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  if (!tensor.is_view()) return tensor.is_leaf();
  // A function of one's own may return a view of memory that it took, which needs no gradient.
  return tensor._base().is_leaf() && tensor._base().requires_grad();
}

KeptTensor::KeptTensor(const at::Tensor& tensor)
    : tensor_(tensor.tensor_data()),  // whose version goes with the original's
      version_(tensor._version()) {}

const at::Tensor& KeptTensor::checked() const {
  if (changed())
    throw UsageError(
        "a tensor of shape {} was changed in place after an operator saved it for backward, which "
        "needs it as it was: change a copy, and step the optimizer after backward",
        c10::str(tensor_.sizes()));
  return tensor_;
}

}  // namespace lockstep::activations

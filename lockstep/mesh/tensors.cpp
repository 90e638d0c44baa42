#include <lockstep/mesh/tensors.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>

namespace lockstep::mesh {

namespace {

at::Tensor box_of(const at::Tensor& whole, const Placement& placement) {
  LOCKSTEP_CHECK(placement.whole_box() && whole.numel() == placement.logical_elements());
  at::Tensor box = whole.view(placement.shape());
  for (std::size_t dim = 0; dim < placement.box().size(); ++dim) {
    const Interval& range = placement.box()[dim];
    box = box.narrow(static_cast<std::int64_t>(dim), range.begin, range.size());
  }
  return box;
}

}  // namespace

at::Tensor part_of(const at::Tensor& whole, const Placement& placement) {
  const c10::NoGradGuard no_grad;
  return box_of(whole.contiguous(), placement).clone(at::MemoryFormat::Contiguous);
}

void write_part(const at::Tensor& whole, const Placement& placement, const at::Tensor& part) {
  const c10::NoGradGuard no_grad;
  box_of(whole, placement).copy_(part.reshape(placement.box_shape()));
}

}  // namespace lockstep::mesh

#include <lockstep/parallel/data_parallel/counted_loss.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {

void check_counted_loss(const at::Tensor& loss_sum, std::int64_t count) {
  if (count < 0 || (count > 0 && !loss_sum.defined()))
    throw UsageError("backward() of a loss over {} samples{}: give the loss's sum and how many "
                     "samples it is over",
                     count, loss_sum.defined() ? "" : " without a loss");
  if (loss_sum.defined() && loss_sum.numel() != 1)
    throw UsageError("backward() of a loss of shape [{}]: it must be one number, the sum over the "
                     "samples",
                     fmt::join(loss_sum.sizes().begin(), loss_sum.sizes().end(), ", "));
}

void CountedLoss::add(const at::Tensor& loss_sum, std::int64_t count, c10::Device device) {
  count_ += count;
  // Not every device has float64.
  const c10::Device place = device.is_cuda() ? device : c10::Device(at::kCPU);
  const at::Tensor value = loss_sum.defined()
                               ? loss_sum.detach().reshape({}).to(place).to(at::kDouble)
                               : at::zeros({}, at::dtype(at::kDouble).device(place));
  loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
}

void CountedLoss::exchange(comm::Communicator& group) {
  const c10::NoGradGuard no_grad;
  totals_.values = at::full({2}, static_cast<double>(count_), loss_sum_.options());
  totals_.values[1].copy_(loss_sum_);
  work_ = group.all_reduce(totals_.values);
}

void CountedLoss::finish() {
  work_.wait();
  work_ = comm::Work();
}

at::Tensor CountedLoss::divisor() const { return totals_.values.narrow(0, 0, 1); }

void CountedLoss::divide(at::Tensor& sums) const {
  // In float at least: 16 bits hold few counts.
  const at::ScalarType wide = at::promote_types(sums.scalar_type(), at::kFloat);
  sums.copy_(sums.to(wide).div_(totals_.values[0].clamp_min(1).to(sums.device(), wide)));
}

void CountedLoss::clear() {
  count_ = 0;
  loss_sum_ = at::Tensor();
}

}  // namespace lockstep::data_parallel

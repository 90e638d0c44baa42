#include <lockstep/optim/grad_scaler.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <tuple>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/base/float16.h>
#include <lockstep/optim/kernels/gradients.h>
#include <lockstep/optim/parallel_blocks.h>
#include <lockstep/optim/parameters.h>

namespace lockstep::optim {

namespace {

at::Tensor at_least_float(const at::Tensor& loss) {
  if (!loss.defined()) throw UsageError("an undefined loss cannot be scaled");
  const auto type = loss.scalar_type();
  if (!at::isFloatingType(type))
    throw UsageError("a loss that is {} cannot be scaled: backward needs a floating-point one",
                     type_and_shape(loss));
  return type == at::kDouble ? loss : loss.to(at::kFloat);
}

}  // namespace

void GradScaler::set_samples_per_sum(double samples) {
  if (!(samples > 0) || !std::isfinite(samples))
    throw UsageError("a loss over {} samples cannot be scaled: give a finite number above 0",
                     samples);
  if (unscaled_)
    throw UsageError("the number of samples of a loss changed between unscale() and update(): set "
                     "it before the step's first backward()");
  samples_per_sum_ = samples;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return at::mul(at_least_float(loss), factor());
}

at::Tensor GradScaler::scale_gradients_of(const at::Tensor& loss) const {
  const at::Tensor wide = at_least_float(loss);
  // A tensor of its own, so that the caller's loss stays without a hook.
  const at::Tensor scaled = wide.view_as(wide);
  if (scaled.requires_grad())
    scaled.register_hook(
        [factor = factor()](const at::Tensor& gradient) { return gradient * factor; });
  return scaled;
}

at::Tensor GradScaler::unscale(const std::vector<NamedParameter>& parameters) {
  if (unscaled_)
    throw UsageError("gradients were unscaled twice in one step: call unscale() once, with all "
                     "parameters, and then update()");
  at::Tensor overflow = unscale_gradients(parameters, factor());
  unscaled_ = true;
  return overflow;
}

bool GradScaler::update(const at::Tensor& overflow) {
  if (!overflow.defined() || overflow.numel() != 1)
    throw UsageError("update() takes a tensor of one element, as unscale() gives it, but got {}",
                     overflow.defined() ? type_and_shape(overflow) : "an undefined one");
  return update(overflow.item<double>() != 0);
}

bool GradScaler::update(bool overflowed) {
  unscaled_ = false;
  scale_.update(overflowed);
  return !overflowed;
}

std::vector<NamedTensor> GradScaler::state() const {
  const LossScaleState& state = scale_.state();
  return {{"loss_scale", at::scalar_tensor(state.scale, at::kDouble)},
          {"loss_scale.good_steps", at::scalar_tensor(state.good_steps, at::kLong)},
          {"loss_scale.hysteresis", at::scalar_tensor(state.hysteresis, at::kLong)}};
}

void GradScaler::load_state(const std::vector<NamedTensor>& saved) {
  const std::vector<at::Tensor> matched = match_saved_state(state(), saved);
  scale_.load_state({.scale = matched[0].item<double>(),
                     .good_steps = matched[1].item<std::int64_t>(),
                     .hysteresis = matched[2].item<std::int64_t>()});
  unscaled_ = false;
}

namespace {

// The size of one call of a kernel.
constexpr std::int64_t kUnscaleBlock = 32768;  // elements

struct Gradient {
  at::Tensor parameter;
  at::Tensor tensor;
};

// The bytes of its storage that a gradient lies in.
struct Extent {
  const void* storage;
  std::int64_t begin;
  std::int64_t end;
  Gradient* gradient;
};

Extent extent_of(Gradient& gradient) {
  const at::Tensor& tensor = gradient.tensor;
  std::int64_t elements = 1;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return {.storage = tensor.storage().unsafeGetStorageImpl(),
          .begin = tensor.storage_offset() * size,
          .end = (tensor.storage_offset() + elements) * size,
          .gradient = &gradient};
}

// Autograd hands one tensor's memory to two parameters where both have the same gradient: divided
// in place, it would be divided twice.
void give_own_memory(std::vector<Gradient>& gradients) {
  std::vector<Extent> extents;
  for (Gradient& gradient : gradients) extents.push_back(extent_of(gradient));
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
  });
  const Extent* last = nullptr;
  for (const Extent& extent : extents) {
    at::Tensor& tensor = extent.gradient->tensor;
    const bool shared =
        last != nullptr && last->storage == extent.storage && extent.begin < last->end;
    if (shared || !tensor.is_non_overlapping_and_dense()) {
      tensor = at::empty_like(tensor, at::MemoryFormat::Contiguous).copy_(tensor);
      extent.gradient->parameter.mutable_grad() = tensor;
    } else {
      last = &extent;
    }
  }
}

std::vector<Gradient> scaled_gradients_of(const std::vector<NamedParameter>& parameters) {
  check_distinct(parameters);
  std::vector<Gradient> gradients;
  for (const NamedParameter& parameter : parameters) {
    at::Tensor gradient = gradient_of(parameter);
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto type = gradient.scalar_type();
    if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16)
      throw UsageError("the gradient of '{}' is {}, which no loss scale divides: Float, Double, "
                       "Half and BFloat16 are known",
                       parameter.name, c10::toString(type));
    gradients.push_back({parameter.tensor, std::move(gradient)});
  }
  give_own_memory(gradients);
  return gradients;
}

bool unscale_block(const at::Tensor& gradient, std::int64_t begin, std::int64_t count,
                   double scale) {
  void* data = gradient.data_ptr();
  const auto rounded = static_cast<float>(scale);
  switch (gradient.scalar_type()) {
    case at::kDouble: return unscale(static_cast<double*>(data) + begin, count, scale);
    case at::kHalf: return unscale(static_cast<Float16*>(data) + begin, count, rounded);
    case at::kBFloat16: return unscale(static_cast<BFloat16*>(data) + begin, count, rounded);
    default: return unscale(static_cast<float*>(data) + begin, count, rounded);
  }
}

at::Tensor unscale_in_memory(const std::vector<at::Tensor>& gradients, double scale) {
  std::vector<std::int64_t> counts;
  for (const at::Tensor& gradient : gradients) counts.push_back(gradient.numel());
  std::atomic<bool> found = false;
  parallel_blocks(counts, kUnscaleBlock, [&](const Block& block) {
    if (unscale_block(gradients[block.range], block.begin, block.count, scale))
      found.store(true, std::memory_order_relaxed);
  });
  for (const at::Tensor& gradient : gradients) gradient.unsafeGetTensorImpl()->bump_version();
  return at::full({1}, found ? 1.0 : 0.0, at::kFloat);
}

// LibTorch has both in one pass there: it looks, then multiplies by the scale's inverse as a float.
// With a power of two from 1 up that is the division, and cannot make what it saw infinite.
bool has_fused_operator(const at::Tensor& gradient, double scale) {
  int power = 0;
  return gradient.is_cuda() && gradient.scalar_type() != at::kBFloat16 && scale >= 1 &&
         std::frexp(scale, &power) == 0.5;
}

// LibTorch rounds a divisor to the tensor's own type on some devices, and Half has no 65536. By a
// number of the host's a GPU does not divide: it multiplies by the inverse.
void divide_with_operators(const at::Tensor& gradient, double scale) {
  const auto wide = gradient.element_size() < 4 ? at::kFloat : gradient.scalar_type();
  const at::Tensor divisor = at::full({}, scale, gradient.options().dtype(wide));
  gradient.copy_(gradient.to(wide).div_(divisor));
}

}  // namespace

at::Tensor unscale_with_operators(const std::vector<at::Tensor>& gradients, double scale) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(gradients.at(0).device());
  std::vector<at::Tensor> found = {at::zeros({1}, options)};
  std::map<at::ScalarType, std::vector<at::Tensor>> fused;
  for (const at::Tensor& gradient : gradients) {
    if (has_fused_operator(gradient, scale)) {
      fused[gradient.scalar_type()].push_back(gradient);
    } else {
      divide_with_operators(gradient, scale);
      found.push_back(at::isfinite(gradient).all().logical_not().to(at::kFloat).view({1}));
    }
  }
  for (const auto& [type, list] : fused)
    at::_amp_foreach_non_finite_check_and_unscale_(list, found.front(),
                                                   at::full({}, 1 / scale, options));
  return found.size() == 1 ? found.front() : at::cat(found).amax(0, /*keepdim=*/true);
}

at::Tensor unscale_gradients(const std::vector<NamedParameter>& parameters, double scale) {
  const c10::NoGradGuard no_grad;
  // std::map has no order for devices.
  std::vector<std::vector<at::Tensor>> by_device;
  for (const Gradient& gradient : scaled_gradients_of(parameters)) {
    const auto same = std::find_if(by_device.begin(), by_device.end(), [&](const auto& list) {
      return list.front().device() == gradient.tensor.device();
    });
    if (same == by_device.end())
      by_device.push_back({gradient.tensor});
    else
      same->push_back(gradient.tensor);
  }
  const c10::Device device =
      parameters.empty() ? c10::Device(at::kCPU) : parameters.front().tensor.device();
  at::Tensor found = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
  for (const std::vector<at::Tensor>& list : by_device) {
    const at::Tensor here = list.front().device().is_cpu() ? unscale_in_memory(list, scale)
                                                           : unscale_with_operators(list, scale);
    found = at::maximum(found, here.to(device));
  }
  return found;
}

}  // namespace lockstep::optim

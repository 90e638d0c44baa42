#include <lockstep/optim/adamw.h>

#include <cmath>
#include <map>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/kernels/adam.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/optim/kernels/cuda/kernels.h>
#endif

namespace lockstep::optim {

namespace {

void check_beta(int number, double beta) {
  // A NaN is refused, too.
  if (!(beta >= 0 && beta < 1))
    throw UsageError("AdamW: betas[{}] is {}; it must be at least 0 and below 1", number, beta);
}

template <typename T>
AdamStep<T> rounded(const AdamStep<double>& exact) {
  return {.beta1 = static_cast<T>(exact.beta1),
          .beta2 = static_cast<T>(exact.beta2),
          .one_minus_beta1 = static_cast<T>(exact.one_minus_beta1),
          .one_minus_beta2 = static_cast<T>(exact.one_minus_beta2),
          .eps = static_cast<T>(exact.eps),
          .step_size = static_cast<T>(exact.step_size),
          .root_correction = static_cast<T>(exact.root_correction),
          .keep = static_cast<T>(exact.keep),
          .coupled_decay = static_cast<T>(exact.coupled_decay)};
}

AdamStep<double> step_of(const AdamWOptions& options, const StepNumbers& numbers) {
  const auto [beta1, beta2] = options.betas;
  const auto t = static_cast<double>(numbers.step);
  const bool decoupled = options.decay == AdamDecay::decoupled;
  const auto seen = [&](double beta) {
    return options.bias_correction ? 1 - std::pow(beta, t) : 1;
  };
  return {.beta1 = beta1,
          .beta2 = beta2,
          .one_minus_beta1 = 1 - beta1,
          .one_minus_beta2 = 1 - beta2,
          .eps = options.eps,
          .step_size = numbers.learning_rate / seen(beta1),
          .root_correction = 1 / std::sqrt(seen(beta2)),
          .keep = decoupled ? 1 - numbers.learning_rate * numbers.weight_decay : 1,
          .coupled_decay = decoupled ? 0 : numbers.weight_decay};
}

template <typename T>
void update_stretch(const AdamStep<double>& step, const Stretch<T>& stretch) {
  adam_update(rounded<T>(step), stretch.count, stretch.weight, stretch.gradient, stretch.state[0],
              stretch.state[1]);
}

void update_by_operators(const AdamStep<double>& step, const DeviceUpdate& tensors) {
  const auto& [numbers, weight, gradient, state] = tensors;
  const at::Tensor &exp_avg = state->at(0), &exp_avg_sq = state->at(1);
  const at::Tensor g =
      step.coupled_decay == 0 ? gradient : at::add(gradient, weight, step.coupled_decay);
  exp_avg.mul_(step.beta1).add_(g, step.one_minus_beta1);
  exp_avg_sq.mul_(step.beta2).addcmul_(g, g, step.one_minus_beta2);
  const at::Tensor denominator = exp_avg_sq.sqrt().mul_(step.root_correction).add_(step.eps);
  weight.mul_(step.keep).addcdiv_(exp_avg, denominator, -step.step_size);
}

#ifdef LOCKSTEP_HAVE_CUDA

// The tensors of one type that our kernel updates together, a launch for each device.
template <typename T>
class KernelTensors {
 public:
  // Whether they are such.
  static bool are(const DeviceUpdate& one) {
    for (const at::Tensor& tensor : {one.weight, one.gradient, one.state->at(0), one.state->at(1)})
      if (!tensor.is_cuda() || !tensor.is_contiguous() ||
          tensor.scalar_type() != c10::CppTypeToScalarType<T>::value)
        return false;
    return true;
  }

  bool take(const DeviceUpdate& one, const AdamStep<double>& step) {
    if (!are(one)) return false;
    const at::Tensor &exp_avg = one.state->at(0), &exp_avg_sq = one.state->at(1);
    by_device_[one.weight.device().index()].push_back({.count = one.weight.numel(),
                                                       .weight = one.weight.data_ptr<T>(),
                                                       .gradient = one.gradient.data_ptr<T>(),
                                                       .exp_avg = exp_avg.data_ptr<T>(),
                                                       .exp_avg_sq = exp_avg_sq.data_ptr<T>(),
                                                       .step = rounded<T>(step)});
    // So that autograd notices a backward that comes too late.
    one.weight.unsafeGetTensorImpl()->bump_version();
    return true;
  }

  void launch(const StepFactor& factor) const {
    for (const auto& [device, tensors] : by_device_) {
      const c10::cuda::CUDAGuard on_device(device);
      const at::Tensor here = factor.is_one() ? at::Tensor()
                                              : factor.tensor().to(c10::Device(at::kCUDA, device),
                                                                   /*non_blocking=*/true);
      cuda::adam_update(tensors.data(), tensors.size(),
                        here.defined() ? here.data_ptr<double>() : nullptr,
                        c10::cuda::getCurrentCUDAStream().stream());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }

 private:
  std::map<c10::DeviceIndex, std::vector<cuda::AdamTensor<T>>> by_device_;
};

#endif

}  // namespace

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : ElementwiseOptimizer(std::move(groups), {"exp_avg", "exp_avg_sq"}), options_(options) {
  check_beta(0, options.betas.first);
  check_beta(1, options.betas.second);
  if (!std::isfinite(options.eps) || options.eps < 0)
    throw UsageError("AdamW: eps is {}; it must be a number from 0 up", options.eps);
}

void AdamW::update(const StepNumbers& numbers, const Stretch<float>& stretch) const {
  update_stretch(step_of(options_, numbers), stretch);
}

void AdamW::update(const StepNumbers& numbers, const Stretch<double>& stretch) const {
  update_stretch(step_of(options_, numbers), stretch);
}

bool AdamW::takes_factor([[maybe_unused]] const DeviceUpdate& tensor) const {
#ifdef LOCKSTEP_HAVE_CUDA
  return KernelTensors<float>::are(tensor) || KernelTensors<double>::are(tensor);
#else
  return false;
#endif
}

void AdamW::update(const std::vector<DeviceUpdate>& tensors,
                   [[maybe_unused]] const StepFactor& factor) const {
#ifdef LOCKSTEP_HAVE_CUDA
  KernelTensors<float> floats;
  KernelTensors<double> doubles;
#endif
  for (const DeviceUpdate& one : tensors) {
    const AdamStep<double> step = step_of(options_, one.numbers);
#ifdef LOCKSTEP_HAVE_CUDA
    if (floats.take(one, step) || doubles.take(one, step)) continue;
#endif
    update_by_operators(step, one);
  }
#ifdef LOCKSTEP_HAVE_CUDA
  floats.launch(factor);
  doubles.launch(factor);
#endif
}

}  // namespace lockstep::optim

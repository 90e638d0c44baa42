#include <map>

#include <ATen/ATen.h>

#include <lockstep/optim/adamw/adam_step.h>
#include <lockstep/optim/adamw/plain/kernel.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/optim/elementwise_optimizer.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/optim/adamw/cuda.h>
#endif

namespace lockstep::optim {

namespace {

template <typename T>
void update_stretch(const AdamStep<double>& step, const Stretch<T>& stretch) {
  adam_update(rounded<T>(step), stretch.count, stretch.weight, stretch.gradient, stretch.state[0],
              stretch.state[1]);
}

void update_by_operators(const AdamStep<double>& step, const ParameterStep& tensors) {
  const at::Tensor &weight = tensors.weight, &gradient = tensors.gradient;
  const at::Tensor &exp_avg = tensors.state->at(0), &exp_avg_sq = tensors.state->at(1);
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
  static bool are(const ParameterStep& one) {
    for (const at::Tensor& tensor : {one.weight, one.gradient, one.state->at(0), one.state->at(1)})
      if (!tensor.is_cuda() || !tensor.is_contiguous() ||
          tensor.scalar_type() != c10::CppTypeToScalarType<T>::value)
        return false;
    return true;
  }

  bool take(const ParameterStep& one, const AdamStep<double>& step) {
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

// State: exp_avg, exp_avg_sq. Its kernel reads weight, gradient and state once and writes them
// once.
class AdamW final : public ElementwiseOptimizer {
 public:
  AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options)
      : ElementwiseOptimizer(std::move(groups), options.state_names()), options_(options) {}

 private:
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override {
    update_stretch(step_of(options_, numbers), stretch);
  }
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override {
    update_stretch(step_of(options_, numbers), stretch);
  }

  bool takes_factor([[maybe_unused]] const ParameterStep& step) const override {
#ifdef LOCKSTEP_HAVE_CUDA
    return KernelTensors<float>::are(step) || KernelTensors<double>::are(step);
#else
    return false;
#endif
  }

  void update(const std::vector<ParameterStep>& elsewhere,
              [[maybe_unused]] const StepFactor& factor) const override {
#ifdef LOCKSTEP_HAVE_CUDA
    KernelTensors<float> floats;
    KernelTensors<double> doubles;
#endif
    for (const ParameterStep& one : elsewhere) {
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

  AdamWOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> AdamWOptions::make(std::vector<ParameterGroup> groups,
                                              std::shared_ptr<Parts> /*parts*/) const {
  return std::make_unique<AdamW>(std::move(groups), *this);
}

}  // namespace lockstep::optim

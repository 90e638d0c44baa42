#include <lockstep/intercept/gradient_hook.h>

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <lockstep/base/error.h>

namespace lockstep::intercept {

namespace {

class PostHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(GradientHook::Callback callback) : callback_(std::move(callback)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    callback_(inputs.empty() ? at::Tensor() : inputs.front());
    return outputs;
  }

 private:
  GradientHook::Callback callback_;
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, Callback callback) : parameter_(parameter) {
  const c10::AutoGradMode grad(true);
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter_);
  key_ = accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(callback)));
}

GradientHook::~GradientHook() { accumulator_->del_post_hook(key_); }

bool GradientHook::hears() const {
  return torch::autograd::impl::try_get_grad_accumulator(parameter_) == accumulator_;
}

bool GradientHook::is_heard(const at::Tensor& parameter) {
  if (!parameter.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator == nullptr) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const PostHook*>(hook.get()) != nullptr;
  });
}

void GradientHook::refuse_gradients(const at::Tensor& parameter, const std::string& reason) {
  // A frozen parameter takes no hook, and may be trained again later.
  const bool is_trained = parameter.requires_grad();
  parameter.set_requires_grad(true);
  // A tensor's own hook stays with it whatever becomes of the accumulator.
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(parameter.getIntrusivePtr());
  parameter.register_hook([weak, reason](const at::Tensor&) {
    auto held = weak.lock();
    if (held && !is_heard(at::Tensor(std::move(held)))) throw UsageError("{}", reason);
  });
  parameter.set_requires_grad(is_trained);
}

bool is_sole_user(const at::Tensor& gradient, const at::Tensor& arrived) {
  std::size_t known = 1;
  std::size_t views = gradient.is_view() ? 1 : 0;
  const at::TensorBase* root = gradient.is_view() ? &gradient._base() : nullptr;
  if (arrived.defined() && arrived.is_alias_of(gradient)) {
    ++known;
    if (arrived.is_view()) {
      const at::TensorBase& other_root = arrived._base();
      if (root != nullptr && !root->is_same(other_root)) return false;
      root = &other_root;
      ++views;
    }
  }
  // What a view is one of lives as long as the view; nobody else may have it.
  if (root != nullptr) {
    if (static_cast<std::size_t>(root->use_count()) > views) return false;
    ++known;
  }
  return static_cast<std::size_t>(gradient.storage().use_count()) <= known;
}

}  // namespace lockstep::intercept

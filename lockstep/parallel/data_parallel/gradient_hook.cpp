#include <lockstep/parallel/data_parallel/gradient_hook.h>

#include <memory>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {

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

// A tensor's own hook, which stays with it whatever becomes of the accumulator.
class Refusal final : public torch::autograd::FunctionPreHook {
 public:
  // That of a tensor, or null.
  static Refusal* of(const at::Tensor& tensor) {
    for (const auto& hook : torch::autograd::impl::hooks(tensor))
      if (auto* const found = dynamic_cast<Refusal*>(hook.get())) return found;
    return nullptr;
  }

  void set_reason(std::string reason) { reason_ = std::move(reason); }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (!reason_.empty()) throw UsageError("{}", reason_);
    return gradients;
  }

 private:
  std::string reason_;  // empty: nothing is refused
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, Callback callback) : parameter_(parameter) {
  if (Refusal* const before = Refusal::of(parameter_)) before->set_reason({});
  const c10::AutoGradMode grad(true);
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter_);
  key_ = accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(callback)));
}

GradientHook::~GradientHook() { accumulator_->del_post_hook(key_); }

bool GradientHook::hears() const {
  return torch::autograd::impl::try_get_grad_accumulator(parameter_) == accumulator_;
}

void GradientHook::refuse_gradients(const at::Tensor& parameter, const std::string& reason) {
  if (Refusal::of(parameter) == nullptr)
    torch::autograd::impl::add_hook(parameter, std::make_unique<Refusal>());
  Refusal::of(parameter)->set_reason(reason);
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

}  // namespace lockstep::data_parallel

#include <lockstep/intercept/backward.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <unordered_set>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/module.h>

#include <lockstep/base/error.h>
#include <lockstep/device/backward_thread.h>

namespace lockstep::intercept {

namespace {

using torch::autograd::Engine;

thread_local SavedTensorHooks* innermost = nullptr;

// The engine that was there before runs the graphs: it may be running some, and only it has threads
// for devices.
class ListeningEngine final : public Engine {
 public:
  // Never destroyed: nodes may be made until the process ends.
  static ListeningEngine& installed() {
    static ListeningEngine* const engine = [] {
      auto* const made = new ListeningEngine(Engine::get_default_engine());
      static Engine* default_engine = made;
      torch::autograd::set_default_engine_stub([]() -> Engine& { return *default_engine; });
      return made;
    }();
    return *engine;
  }

  bool runs_in_libtorchs_own() const { return typeid(under_) == typeid(Engine); }

  void add(const std::shared_ptr<PassListener>& listener) {
    const std::lock_guard lock(mutex_);
    std::erase_if(listeners_, [](const auto& known) { return known.expired(); });
    listeners_.push_back(listener);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? under_.get_default_saved_variable_hooks() : innermost->make();
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return under_.make_anomaly_metadata();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const bool within = torch::autograd::get_current_graph_task_nodes_in_graph() != nullptr;
    const device::BackwardThread caller;
    if (accumulate_grad) tell_listeners(Pass(roots, outputs), within);
    return under_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

 private:
  explicit ListeningEngine(Engine& under) : under_(under) {}

  void tell_listeners(const Pass& pass, bool within) {
    std::vector<std::shared_ptr<PassListener>> told;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& known : listeners_)
        if (auto listener = known.lock()) told.push_back(std::move(listener));
    }
    for (const auto& listener : told)
      within ? listener->before_inner_pass(pass) : listener->before_pass(pass);
  }

  Engine& under_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<PassListener>> listeners_;
};

}  // namespace

bool Pass::any_node(const Visit& visit) const {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> next;
  const auto is_wanted = [&](const torch::autograd::Edge& edge) {
    if (!edge.is_valid() || !seen.insert(edge.function.get()).second) return false;
    next.push_back(edge.function.get());
    return visit(edge.function.get());
  };
  if (!ends_.empty()) return std::ranges::any_of(ends_, is_wanted);
  if (std::ranges::any_of(roots_, is_wanted)) return true;
  while (!next.empty()) {
    const torch::autograd::Node* const node = next.back();
    next.pop_back();
    if (std::ranges::any_of(node->next_edges(), is_wanted)) return true;
  }
  return false;
}

bool Pass::reaches(std::span<const at::Tensor> parameters) const {
  std::unordered_set<const torch::autograd::Node*> wanted;
  for (const at::Tensor& parameter : parameters)
    if (parameter.defined() && parameter.is_leaf())
      if (const auto adds = torch::autograd::impl::try_get_grad_accumulator(parameter))
        wanted.insert(adds.get());
  return any_node([&](const torch::autograd::Node* node) { return wanted.contains(node); });
}

const GradientHook* Pass::reached_of(std::span<const GradientHook* const> hooks) const {
  const GradientHook* reached = nullptr;
  any_node([&](const torch::autograd::Node* node) {
    const auto found = std::ranges::find_if(
        hooks, [&](const GradientHook* hook) { return hook->accumulator_.get() == node; });
    if (found != hooks.end()) reached = *found;
    return reached != nullptr;
  });
  return reached;
}

void add_pass_listener(const std::shared_ptr<PassListener>& listener) {
  ListeningEngine::installed().add(listener);
}

HookScope::HookScope(SavedTensorHooks& hooks) : outer_(innermost) {
  if (!ListeningEngine::installed().runs_in_libtorchs_own())
    throw UsageError("autograd already runs in an engine of somebody else's, as in a Python "
                     "process, and recomputation and offload of activations need LibTorch's own: "
                     "use them in a C++ program");
  innermost = &hooks;
}

HookScope::~HookScope() { innermost = outer_; }

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
  // A view keeps its base alive; no one else may hold the base.
  if (root != nullptr) {
    if (static_cast<std::size_t>(root->use_count()) > views) return false;
    ++known;
  }
  return static_cast<std::size_t>(gradient.storage().use_count()) <= known;
}

void refuse_wrapped(const torch::nn::Module& model, const std::string& function) {
  for (const auto& item : model.named_parameters())
    if (GradientHook::is_heard(item.value()))
      throw UsageError("{} was given '{}' of a model that is wrapped already, whose gradients "
                       "are exchanged as it is: call it before wrap_model()",
                       function, item.key());
}

}  // namespace lockstep::intercept

#include <lockstep/intercept/engine.h>

#include <mutex>
#include <typeinfo>
#include <vector>

#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>

namespace lockstep::intercept {

namespace {

using torch::autograd::Engine;

thread_local SavedTensorHooks* innermost = nullptr;

// The engine that was there before runs the graph: it may have done so already, and it alone has
// threads for devices.
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
    if (accumulate_grad && !within) tell_listeners();
    return under_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

 private:
  explicit ListeningEngine(Engine& under) : under_(under) {}

  void tell_listeners() {
    std::vector<std::shared_ptr<PassListener>> told;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& known : listeners_)
        if (auto listener = known.lock()) told.push_back(std::move(listener));
    }
    for (const auto& listener : told) listener->before_pass();
  }

  Engine& under_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<PassListener>> listeners_;
};

}  // namespace

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

}  // namespace lockstep::intercept

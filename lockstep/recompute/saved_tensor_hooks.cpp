#include <lockstep/recompute/saved_tensor_hooks.h>

#include <typeinfo>

#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>

namespace lockstep::activations {

namespace {

thread_local SavedTensorHooks* innermost = nullptr;

// LibTorch's own engine runs the graph: it may have done so before, and it alone has threads for
// devices.
class EngineWithHooks : public torch::autograd::Engine {
 public:
  // Never destroyed: nodes may be made until the process ends.
  static Engine& instance() {
    static auto* const engine = new EngineWithHooks;
    return *engine;
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? nullptr : innermost->make();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                     outputs);
  }
};

void install_engine() {
  static const bool installed = [] {
    if (typeid(torch::autograd::Engine::get_default_engine()) != typeid(torch::autograd::Engine))
      throw UsageError(
          "autograd already runs in an engine of somebody else's, as in a Python process, and "
          "recomputation and offload of activations need one of their own: use them in a C++ "
          "program");
    torch::autograd::set_default_engine_stub(&EngineWithHooks::instance);
    return true;
  }();
  (void)installed;
}

}  // namespace

HookScope::HookScope(SavedTensorHooks& hooks) : outer_(innermost) {
  install_engine();
  innermost = &hooks;
}

HookScope::~HookScope() { innermost = outer_; }

}  // namespace lockstep::activations

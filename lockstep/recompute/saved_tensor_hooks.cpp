#include <lockstep/recompute/saved_tensor_hooks.h>

#include <typeinfo>

#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>

namespace lockstep::activations {

namespace {

thread_local SavedTensorHooks* innermost = nullptr;

class EngineWithHooks : public torch::autograd::Engine {
 public:
  // Never destroyed, as it may have threads that wait for work when the process ends.
  static Engine& instance() {
    static auto* const engine = new EngineWithHooks;
    return *engine;
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? nullptr : innermost->make();
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

#include <lockstep/intercept/mode.h>

#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <lockstep/base/error.h>

namespace lockstep::intercept {

void check_key_is_free(c10::DispatchKey key, const std::string& what_for) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::string taken;
  if (dispatcher.hasBackendFallbackForDispatchKey(key)) taken = "all operators";
  for (const c10::OperatorName& name : dispatcher.getAllOpNames())
    if (const auto op = dispatcher.findOp(name); op && op->hasKernelForDispatchKey(key))
      taken = c10::toString(name);
  if (!taken.empty())
    throw UsageError(
        "another library of this process has functions of its own for {} under "
        "LibTorch's dispatch key {}, by which Lockstep {}: do without that library, or "
        "without these",
        taken, c10::toString(key), what_for);
}

namespace {

// The dispatcher calls a plain function, which finds the listener here.
thread_local Listener* current_listener = nullptr;

void on_operator_in_mode(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  if (current_listener != nullptr) {
    current_listener->on_operator(op, keys, stack);
    return;
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode), stack);
}

bool claim_mode() {
  check_key_is_free(kMode, "builds models unit by unit and keeps results of operations");
  // This is done at run time because the linker may drop static initialisers of a static library.
  // It is never undone: threads may compute until the process ends.
  auto* const library = new torch::Library(torch::Library::IMPL, "_", kMode, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&on_operator_in_mode>());
  return true;
}

}  // namespace

ModeScope::ModeScope(Listener* listener)
    : outer_(current_listener), outer_included_(c10::impl::tls_is_dispatch_key_included(kMode)) {
  static const bool claimed = claim_mode();
  LOCKSTEP_CHECK(claimed);
  c10::impl::tls_set_dispatch_key_included(kMode, listener != nullptr);
  current_listener = listener;
}

ModeScope::~ModeScope() {
  current_listener = outer_;
  c10::impl::tls_set_dispatch_key_included(kMode, outer_included_);
}

Listener* ModeScope::current() { return current_listener; }

}  // namespace lockstep::intercept

// Every operator that a thread calls comes to a listener first, whatever it is called on: by a
// dispatch key that a scope turns on for the thread, and that LibTorch itself has no use for.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep::intercept {

inline constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

class Listener {
 public:
  virtual ~Listener() = default;

  // In place of the operator: runs it, under a guard that excludes kMode or with the keys below it,
  // or leaves other results on the stack.
  virtual void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) = 0;
};

// While it lasts, this thread's operators lead to `listener`, which outlives it; with null, to
// nobody. Scopes nest: the innermost counts. Threads that take over this one's state, as autograd's
// do, have no listener.
//
// Failure: UsageError where another library of the process has functions under the key; the first
// scope finds out.
class [[nodiscard]] ModeScope {
 public:
  explicit ModeScope(Listener* listener);
  ~ModeScope();
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

  // That of the scope that this thread is in, or null.
  static Listener* current();

 private:
  Listener* outer_;
  bool outer_included_;
};

}  // namespace lockstep::intercept

// Every operator that a thread calls comes to a listener first, whatever tensors it is called on. A
// scope turns on a dispatch key for the thread that LibTorch itself does not use.
#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep::intercept {

inline constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

class Listener {
 public:
  virtual ~Listener() = default;

  // Called in place of the operator. It runs the operator, under a guard that excludes kMode or
  // with the keys below kMode, or puts other results on the stack.
  virtual void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) = 0;
};

// While it lives, this thread's operators come to `listener`, which outlives it; with null, to
// nobody. Scopes nest: the innermost counts. Threads that inherit this thread's state, such as
// autograd's, have no listener.
//
// Failure: UsageError from the first scope where another library of the process uses the key.
class [[nodiscard]] ModeScope {
 public:
  explicit ModeScope(Listener* listener);
  ~ModeScope();
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

  // The listener of the scope that this thread is in, or null.
  static Listener* current();

 private:
  Listener* outer_;
  bool outer_included_;
};

// UsageError where another library of this process has functions under a dispatch key that we want;
// `what_for` says what Lockstep does with it.
void check_key_is_free(c10::DispatchKey key, const std::string& what_for);

}  // namespace lockstep::intercept

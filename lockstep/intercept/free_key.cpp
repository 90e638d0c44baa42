#include <lockstep/intercept/free_key.h>

#include <ATen/core/dispatch/Dispatcher.h>

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

}  // namespace lockstep::intercept

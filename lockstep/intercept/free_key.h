// Whether a dispatch key is ours to take.
#pragma once

#include <string>

#include <c10/core/DispatchKey.h>

namespace lockstep::intercept {

// UsageError where another library of this process has functions under the key; `what_for` says
// what Lockstep does by it.
void check_key_is_free(c10::DispatchKey key, const std::string& what_for);

}  // namespace lockstep::intercept

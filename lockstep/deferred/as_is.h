// Operators of this thread that neither a factory of ours nor an owner of a tensor hears of, and
// that neither autograd nor autocast takes part in: they see memory as it is.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <lockstep/deferred/factory_scope.h>
#include <lockstep/intercept/key.h>

namespace lockstep::deferred {

class AsIs {
 private:
  c10::impl::ExcludeDispatchKeyGuard below_{
      c10::DispatchKeySet({intercept::kMode, intercept::kKey}) | c10::autocast_dispatch_keyset};
  c10::NoGradGuard no_grad_;
};

}  // namespace lockstep::deferred

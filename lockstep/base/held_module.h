// The module that a user means by a type: users name either the holder that TORCH_MODULE makes, or
// the module in it.
#pragma once

namespace lockstep {

namespace internal {

template <typename Module>
struct HeldModule {
  using Type = Module;
};
template <typename Holder>
requires requires { typename Holder::ContainedType; }
struct HeldModule<Holder> {
  using Type = typename Holder::ContainedType;
};

}  // namespace internal

// The module type that a holder holds; for any other type, the type itself.
template <typename Module>
using held_module = typename internal::HeldModule<Module>::Type;

}  // namespace lockstep

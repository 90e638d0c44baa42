// Which module is meant by a type: users name the holder that TORCH_MODULE makes, or what it holds.
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

// What a holder holds, or the type itself.
template <typename Module>
using held_module = typename internal::HeldModule<Module>::Type;

}  // namespace lockstep

// The one version of Lockstep: the CMake project's.
#pragma once

#include <string_view>

namespace lockstep {

// "0.1.0": what `lockstep --version`, the CMake package and the manifests of checkpoints say.
std::string_view version();

}  // namespace lockstep

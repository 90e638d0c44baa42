// Where a function was called from.
#pragma once

#include <version>

#if defined(__cpp_lib_source_location)
#include <source_location>
#else  // clang before 16, with which clang-tidy reads our headers
#include <experimental/source_location>
#endif

namespace lockstep {

#if defined(__cpp_lib_source_location)
using CallSite = std::source_location;
#else
using CallSite = std::experimental::source_location;
#endif

}  // namespace lockstep

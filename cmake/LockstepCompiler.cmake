# How every file of ours is compiled.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers defeat ccache unless it may overlook their time stamps.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${CCACHE_PROGRAM})
endif()

# A faster linker where there is one that works: a change to one file relinks in about a second.
if(NOT LOCKSTEP_SANITIZE)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LINK_OPTIONS -fuse-ld=mold)
  set(CMAKE_REQUIRED_QUIET ON)
  check_cxx_source_compiles("int main() {}" LOCKSTEP_MOLD_WORKS)
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
  unset(CMAKE_REQUIRED_QUIET)
  if(LOCKSTEP_MOLD_WORKS AND NOT CMAKE_INTERPROCEDURAL_OPTIMIZATION)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

add_library(lockstep_compiler INTERFACE)
target_compile_options(lockstep_compiler INTERFACE
  -Wall -Wextra -Wno-missing-field-initializers
  # Libraries and programs alike, so that they can share a precompiled header.
  -fPIC
  # The order of additions is a promise: no fused multiply-add that the source does not ask for.
  -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND LOCKSTEP_PRECOMPILED_HEADERS)
  # ccache needs this to cache users of a precompiled header.
  target_compile_options(lockstep_compiler INTERFACE -fpch-preprocess)
endif()
if(LOCKSTEP_SANITIZE)
  target_compile_options(lockstep_compiler INTERFACE
    -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # The sanitizers' own code makes g++ see uninitialised reads in the standard library.
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(lockstep_compiler INTERFACE -fsanitize=${LOCKSTEP_SANITIZE})
endif()
if(LOCKSTEP_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "LOCKSTEP_FUZZ needs clang (libFuzzer): configure with "
                        "-DCMAKE_CXX_COMPILER=clang++, in a build folder of its own")
  endif()
  target_link_options(lockstep_compiler INTERFACE -fsanitize=fuzzer-no-link)
endif()

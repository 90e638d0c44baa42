# How every file of ours is compiled.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers defeat ccache unless it may overlook their time stamps.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${CCACHE_PROGRAM})
endif()

# A faster linker where there is one: a change to one file relinks in about a second.
if(NOT LOCKSTEP_SANITIZE)
  find_program(MOLD_PROGRAM mold)
  if(MOLD_PROGRAM AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

add_library(lockstep_compiler INTERFACE)
target_compile_options(lockstep_compiler INTERFACE
  -Wall -Wextra -Wno-missing-field-initializers
  # The order of additions is a promise: no fused multiply-add that the source does not ask for.
  -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # ccache needs this to cache users of a precompiled header.
  target_compile_options(lockstep_compiler INTERFACE -fpch-preprocess)
endif()
if(LOCKSTEP_SANITIZE)
  target_compile_options(lockstep_compiler INTERFACE
    -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(lockstep_compiler INTERFACE -fsanitize=${LOCKSTEP_SANITIZE})
endif()
if(LOCKSTEP_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "LOCKSTEP_FUZZ needs clang (libFuzzer): configure with "
                        "-DCMAKE_CXX_COMPILER=clang++, in a build folder of its own")
  endif()
  # Everything is to be seen by the fuzzer, not only the targets.
  target_compile_options(lockstep_compiler INTERFACE -fsanitize=fuzzer-no-link)
  target_link_options(lockstep_compiler INTERFACE -fsanitize=fuzzer-no-link)
endif()

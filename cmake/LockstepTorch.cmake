# Finds LibTorch: Torch_DIR where given, then the one inside an installed Python torch, then the
# system's. Says which.
if(Torch_DIR AND NOT EXISTS "${Torch_DIR}/TorchConfig.cmake")
  if(EXISTS "${Torch_DIR}/share/cmake/Torch/TorchConfig.cmake")
    set(Torch_DIR "${Torch_DIR}/share/cmake/Torch" CACHE PATH "Where TorchConfig.cmake is" FORCE)
  else()
    message(FATAL_ERROR "Torch_DIR is '${Torch_DIR}', which has no TorchConfig.cmake: set it to "
                        "LibTorch's share/cmake/Torch, or unset it")
  endif()
endif()
if(NOT Torch_DIR AND NOT DEFINED ENV{Torch_DIR})
  find_program(LOCKSTEP_PYTHON NAMES python3)
  if(LOCKSTEP_PYTHON)
    execute_process(
      COMMAND ${LOCKSTEP_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/python_torch_dir.py
      OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(python_torch)
      set(Torch_DIR "${python_torch}" CACHE PATH "Where TorchConfig.cmake is" FORCE)
    endif()
  endif()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/LockstepTorchTarget.cmake)
message(STATUS "Lockstep: LibTorch ${LOCKSTEP_TORCH_VERSION} (${Torch_DIR})")

if(LOCKSTEP_REQUIRE_CUDA AND NOT LOCKSTEP_TORCH_CUDA)
  message(FATAL_ERROR "the LibTorch in ${Torch_DIR} has no CUDA: set Torch_DIR to one that has, or "
                      "run in a Python environment whose torch has")
endif()

# Compiles LibTorch's headers once; the parts and tests that include them share the result, so they
# must all be compiled with the same flags. Two sets, as every user of a precompiled header pays for
# the templates it leaves to instantiate: 2 s for ATen, 5 s with autograd and torch::nn's modules
# (7 s for all of torch/torch.h).
function(lockstep_precompile name)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/${name}.cpp CONTENT "")
  add_library(${name} OBJECT ${PROJECT_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PRIVATE
    lockstep_compiler Lockstep::torch spdlog::spdlog Threads::Threads)
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()
if(LOCKSTEP_PRECOMPILED_HEADERS)
  lockstep_precompile(lockstep_precompiled <ATen/ATen.h>)
  lockstep_precompile(lockstep_precompiled_modules
    <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/nn/module.h> <torch/nn/pimpl.h>)
endif()

# Compiles a target of ours against LibTorch; `visibility` is PUBLIC, PRIVATE or INTERFACE. MODULES
# marks one whose files include torch::nn or autograd.
function(lockstep_use_torch target visibility)
  cmake_parse_arguments(USE "MODULES" "" "" ${ARGN})
  target_link_libraries(${target} ${visibility} Lockstep::torch)
  if(LOCKSTEP_PRECOMPILED_HEADERS AND NOT visibility STREQUAL INTERFACE)
    if(USE_MODULES)
      target_precompile_headers(${target} REUSE_FROM lockstep_precompiled_modules)
    else()
      target_precompile_headers(${target} REUSE_FROM lockstep_precompiled)
    endif()
  endif()
endfunction()

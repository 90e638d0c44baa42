# Finds LibTorch: Torch_DIR where given, then one in CMAKE_PREFIX_PATH (an unpacked zip), then the one
# inside an installed Python torch, then the system's. Says which.
if(Torch_DIR AND NOT EXISTS "${Torch_DIR}/TorchConfig.cmake")
  if(EXISTS "${Torch_DIR}/share/cmake/Torch/TorchConfig.cmake")
    set(Torch_DIR "${Torch_DIR}/share/cmake/Torch" CACHE PATH "Where TorchConfig.cmake is" FORCE)
  else()
    message(FATAL_ERROR "Torch_DIR is '${Torch_DIR}', which has no TorchConfig.cmake: set it to "
                        "LibTorch's share/cmake/Torch, or unset it")
  endif()
endif()
if(NOT Torch_DIR)
  find_path(LOCKSTEP_TORCH_IN_PREFIX TorchConfig.cmake NO_DEFAULT_PATH NO_CACHE
    PATHS ${CMAKE_PREFIX_PATH} PATH_SUFFIXES share/cmake/Torch)
  if(LOCKSTEP_TORCH_IN_PREFIX)
    set(Torch_DIR "${LOCKSTEP_TORCH_IN_PREFIX}" CACHE PATH "Where TorchConfig.cmake is" FORCE)
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

# For kernels of ours; newer versions of LibTorch have done it already, and all bring the runtime.
if(LOCKSTEP_TORCH_CUDA)
  enable_language(CUDA)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
endif()

# Two sets: what instantiates templates of ATen alone takes 2 s, and 5 s with autograd's and torch::nn's
# (7 s with all of torch/torch.h).
set(LOCKSTEP_TORCH_HEADERS <ATen/ATen.h>)
set(LOCKSTEP_TORCH_MODULE_HEADERS
  <ATen/ATen.h> <torch/csrc/autograd/custom_function.h> <torch/nn/module.h> <torch/nn/pimpl.h>)
set(links lockstep_compiler Lockstep::torch spdlog::spdlog Threads::Threads)
lockstep_precompile(lockstep_precompiled LINKS ${links} HEADERS ${LOCKSTEP_TORCH_HEADERS})
lockstep_precompile(lockstep_precompiled_modules
  LINKS ${links} HEADERS ${LOCKSTEP_TORCH_MODULE_HEADERS})

# Compiles a target of ours against LibTorch; `visibility` is PUBLIC, PRIVATE or INTERFACE. MODULES
# marks one whose files include torch::nn or autograd.
function(lockstep_use_torch target visibility)
  cmake_parse_arguments(USE "MODULES" "" "" ${ARGN})
  target_link_libraries(${target} ${visibility} Lockstep::torch)
  if(visibility STREQUAL INTERFACE)
    return()
  endif()
  if(USE_MODULES)
    lockstep_reuse(${target} lockstep_precompiled_modules)
  else()
    lockstep_reuse(${target} lockstep_precompiled)
  endif()
endfunction()

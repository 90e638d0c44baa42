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
# must all be compiled with the same flags. ATen and not torch/torch.h: every user of a precompiled
# header pays for the templates it leaves to instantiate, which are 3 s for the one and 12 s for the
# other.
if(LOCKSTEP_PRECOMPILED_HEADERS)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/precompiled.cpp CONTENT "")
  add_library(lockstep_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled.cpp)
  target_link_libraries(lockstep_precompiled PRIVATE
    lockstep_compiler Lockstep::torch spdlog::spdlog Threads::Threads)
  target_precompile_headers(lockstep_precompiled PRIVATE <ATen/ATen.h>)
endif()

# Compiles a target of ours against LibTorch; `visibility` is PUBLIC, PRIVATE or INTERFACE.
function(lockstep_use_torch target visibility)
  target_link_libraries(${target} ${visibility} Lockstep::torch)
  if(LOCKSTEP_PRECOMPILED_HEADERS AND NOT visibility STREQUAL INTERFACE)
    target_precompile_headers(${target} REUSE_FROM lockstep_precompiled)
  endif()
endfunction()

# Finds LibTorch: Torch_DIR where given, then the one inside an installed Python torch, then the
# system's. Says which, and what engines it brings.
if(NOT Torch_DIR)
  find_program(LOCKSTEP_PYTHON NAMES python3)
  if(LOCKSTEP_PYTHON)
    execute_process(
      COMMAND ${LOCKSTEP_PYTHON} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(python_torch AND EXISTS "${python_torch}/Torch/TorchConfig.cmake")
      set(Torch_DIR "${python_torch}/Torch" CACHE PATH "Where TorchConfig.cmake is")
    endif()
  endif()
endif()
find_package(Torch REQUIRED)

find_path(LOCKSTEP_TORCH_VERSION_DIR torch/version.h
  HINTS ${TORCH_INCLUDE_DIRS} PATH_SUFFIXES torch/csrc/api/include)
set(torch_version "unknown")
if(LOCKSTEP_TORCH_VERSION_DIR)
  file(STRINGS ${LOCKSTEP_TORCH_VERSION_DIR}/torch/version.h lines REGEX "TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
  list(JOIN numbers "." torch_version)
endif()
message(STATUS "LibTorch ${torch_version} (${Torch_DIR})")

# One target of ours for all of LibTorch. Its headers are the system's: their warnings are not ours.
add_library(lockstep_torch INTERFACE)
target_link_libraries(lockstep_torch INTERFACE ${TORCH_LIBRARIES})
target_include_directories(lockstep_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})

# Debian's LibTorch computes with whatever BLAS is installed; its thread pool must be told how many
# threads a rank has.

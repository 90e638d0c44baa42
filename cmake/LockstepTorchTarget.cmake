# One target for all of LibTorch, Lockstep::torch. Used by our build and by the installed package.
# Also sets LOCKSTEP_TORCH_VERSION and LOCKSTEP_TORCH_CUDA.
find_package(Torch REQUIRED)

# TorchConfig.cmake has no version that can be relied on; its header has.
set(LOCKSTEP_TORCH_VERSION "unknown")
foreach(folder IN LISTS TORCH_INCLUDE_DIRS)
  if(EXISTS "${folder}/torch/version.h" AND LOCKSTEP_TORCH_VERSION STREQUAL "unknown")
    file(STRINGS "${folder}/torch/version.h" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
    list(JOIN numbers "." LOCKSTEP_TORCH_VERSION)
  endif()
endforeach()
set(LOCKSTEP_TORCH_CUDA OFF)
if(TARGET torch_cuda OR TARGET torch_cuda_library)
  set(LOCKSTEP_TORCH_CUDA ON)
endif()

if(NOT TARGET Lockstep::torch)
  add_library(Lockstep::torch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(Lockstep::torch INTERFACE ${TORCH_LIBRARIES})
  # The system's headers: their warnings are not ours.
  target_include_directories(Lockstep::torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
endif()

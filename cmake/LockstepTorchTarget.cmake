# One target for all of LibTorch, Lockstep::torch. Used by our build and by the installed package.
# Also sets LOCKSTEP_TORCH_VERSION and LOCKSTEP_TORCH_CUDA.

# A LibTorch with CUDA wants the toolkit's compiler, which is often not in PATH.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(LOCKSTEP_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  if(LOCKSTEP_NVCC)
    set(CMAKE_CUDA_COMPILER ${LOCKSTEP_NVCC})
  endif()
endif()
find_package(Torch REQUIRED)

# TorchConfig.cmake has no version that can be relied on; a header has, which moved once.
set(LOCKSTEP_TORCH_VERSION "of unknown version")
foreach(header IN ITEMS torch/version.h torch/headeronly/version.h)
  foreach(folder IN LISTS TORCH_INCLUDE_DIRS)
    if(EXISTS "${folder}/${header}")
      file(STRINGS "${folder}/${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      if(lines)
        string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
        list(JOIN numbers "." LOCKSTEP_TORCH_VERSION)
      endif()
    endif()
  endforeach()
endforeach()
set(LOCKSTEP_TORCH_CUDA OFF)
if(TARGET torch_cuda OR TARGET torch_cuda_library)
  set(LOCKSTEP_TORCH_CUDA ON)
endif()

if(NOT TARGET Lockstep::torch)
  add_library(Lockstep::torch INTERFACE IMPORTED GLOBAL)
  # PyTorch's own builds export parts of an older libstdc++ (std::filesystem, some of it broken):
  # the system's must be found first.
  target_link_libraries(Lockstep::torch INTERFACE stdc++ ${TORCH_LIBRARIES})
  # The system's headers: their warnings are not ours.
  target_include_directories(Lockstep::torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
  # PyTorch's own builds carry the headers of a fmt that no library of theirs or of the system
  # exports, and they come first: compile what is used of it.
  foreach(folder IN LISTS TORCH_INCLUDE_DIRS)
    if(EXISTS "${folder}/fmt/format.h" AND NOT folder STREQUAL "/usr/include")
      target_compile_definitions(Lockstep::torch INTERFACE FMT_HEADER_ONLY)
    endif()
  endforeach()
endif()

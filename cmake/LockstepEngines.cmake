# Which engines can be built: sets LOCKSTEP_HAVE_GLOO, LOCKSTEP_HAVE_NCCL and LOCKSTEP_HAVE_MPI, and
# says why one is left out. Their headers are in LOCKSTEP_GLOO_INCLUDE_DIR, LOCKSTEP_NCCL_INCLUDE_DIR
# and the target MPI::MPI_CXX.
find_path(LOCKSTEP_C10D_INCLUDE_DIR torch/csrc/distributed/c10d/ProcessGroup.hpp
  HINTS ${TORCH_INCLUDE_DIRS} NO_DEFAULT_PATH)

# c10d's Gloo: LibTorch contains it or not, and its headers need Gloo's, of the version that LibTorch
# was built with: beside its own headers, and nowhere else.
set(LOCKSTEP_HAVE_GLOO OFF)
find_path(LOCKSTEP_GLOO_INCLUDE_DIR gloo/algorithm.h HINTS ${TORCH_INCLUDE_DIRS} NO_DEFAULT_PATH)
if(NOT LOCKSTEP_C10D_INCLUDE_DIR)
  set(gloo "no: LibTorch was built without c10d")
elseif(NOT LOCKSTEP_GLOO_INCLUDE_DIR)
  set(gloo "no: gloo's headers are not beside LibTorch's (Debian: libgloo-dev)")
else()
  if(NOT DEFINED LOCKSTEP_TORCH_CONTAINS_GLOO)
    find_library(LOCKSTEP_TORCH_CPU_LIBRARY torch_cpu HINTS ${TORCH_INSTALL_PREFIX}/lib)
    execute_process(COMMAND ${CMAKE_NM} -D --defined-only ${LOCKSTEP_TORCH_CPU_LIBRARY}
      OUTPUT_VARIABLE symbols ERROR_QUIET)
    string(FIND "${symbols}" "N4c10d16ProcessGroupGloo" at)
    if(at GREATER -1)
      set(LOCKSTEP_TORCH_CONTAINS_GLOO ON CACHE INTERNAL "")
    else()
      set(LOCKSTEP_TORCH_CONTAINS_GLOO OFF CACHE INTERNAL "")
    endif()
  endif()
  set(LOCKSTEP_HAVE_GLOO ${LOCKSTEP_TORCH_CONTAINS_GLOO})
  set(gloo "no: LibTorch was built without it")
endif()
if(LOCKSTEP_HAVE_GLOO)
  set(gloo "yes")
endif()

# NCCL: the library comes with LibTorch's CUDA library; nccl.h may be the toolkit's or a Python package's.
set(LOCKSTEP_HAVE_NCCL OFF)
if(NOT LOCKSTEP_TORCH_CUDA)
  set(nccl "no: LibTorch has no CUDA")
else()
  file(GLOB python_nccl ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include)
  find_path(LOCKSTEP_NCCL_INCLUDE_DIR nccl.h
    HINTS ${TORCH_INCLUDE_DIRS} ${python_nccl} ${CUDAToolkit_INCLUDE_DIRS} ${CUDA_INCLUDE_DIRS}
          $ENV{CUDA_HOME}/include /usr/local/cuda/include)
  set(nccl_version 0.0)
  if(LOCKSTEP_NCCL_INCLUDE_DIR)
    file(STRINGS ${LOCKSTEP_NCCL_INCLUDE_DIR}/nccl.h lines REGEX "#define NCCL_(MAJOR|MINOR) ")
    string(REGEX REPLACE ".*NCCL_MAJOR ([0-9]+).*NCCL_MINOR ([0-9]+).*" "\\1.\\2" nccl_version "${lines}")
  endif()
  if(LOCKSTEP_NCCL_INCLUDE_DIR AND nccl_version VERSION_LESS 2.19)
    set(nccl "no: nccl.h is that of NCCL ${nccl_version}, and 2.19 is needed")
  elseif(LOCKSTEP_NCCL_INCLUDE_DIR)
    set(LOCKSTEP_HAVE_NCCL ON)
    set(nccl "yes")
  else()
    set(nccl "no: nccl.h was not found (Debian: libnccl-dev)")
  endif()
endif()

set(LOCKSTEP_HAVE_MPI OFF)
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND)
  set(LOCKSTEP_HAVE_MPI ON)
  set(mpi "yes, MPI ${MPI_CXX_VERSION}")
else()
  set(mpi "no: it was not found (Debian: libopenmpi-dev)")
endif()

message(STATUS "Lockstep: engine gloo: ${gloo}")
message(STATUS "Lockstep: engine nccl: ${nccl}")
message(STATUS "Lockstep: engine mpi: ${mpi}")

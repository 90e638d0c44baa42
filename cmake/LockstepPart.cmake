# A part of Lockstep: one folder, one namespace, one library target.
#
#   lockstep_part(store USES net)                   without LibTorch
#   lockstep_part(mesh USES comm LIBTORCH)          with LibTorch
#   lockstep_part(models USES nn LIBTORCH MODULES)  with torch::nn or autograd's headers, too
#
# Makes the target lockstep_<name>, which others know as Lockstep::<name>, from every .cpp of the
# folder it is called in; SOURCES overrides that. USES names the other parts it may include, and must
# agree with the arrows in ARCHITECTURE.md; LINKS names libraries that only its .cpp files need. LOOPS
# marks a part in which tests spend their time: the sanitizers' builds optimise it, and take twice as
# long to compile it.
function(lockstep_part name)
  cmake_parse_arguments(PART "LIBTORCH;MODULES;LOOPS" "" "USES;LINKS;SOURCES" ${ARGN})
  if(PART_LIBTORCH AND NOT LOCKSTEP_LIBTORCH)
    return()
  endif()
  if(NOT PART_SOURCES)
    file(GLOB PART_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  endif()
  set(target lockstep_${name})
  # A part may be all headers.
  set(kind STATIC)
  set(public PUBLIC)
  if(NOT PART_SOURCES)
    set(kind INTERFACE)
    set(public INTERFACE)
  endif()
  add_library(${target} ${kind} ${PART_SOURCES})
  add_library(Lockstep::${name} ALIAS ${target})
  if(LOCKSTEP_SANITIZE AND PART_SOURCES)
    # Only what tests use is of interest there.
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(${target} ${public} cxx_std_20)
  target_include_directories(${target} ${public}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  list(TRANSFORM PART_USES PREPEND lockstep_)
  target_link_libraries(${target} ${public} ${PART_USES})
  if(PART_SOURCES)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:lockstep_compiler> ${PART_LINKS})
    if(LOCKSTEP_SANITIZE AND PART_LOOPS)
      target_compile_options(${target} PRIVATE -O1)
    endif()
    if(LOCKSTEP_FUZZ)
      # The fuzzer is to see all of what its targets call.
      target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
  endif()
  # Two sets, so that a user of parts without LibTorch needs none.
  if(PART_LIBTORCH)
    if(PART_MODULES)
      lockstep_use_torch(${target} ${public} MODULES)
    else()
      lockstep_use_torch(${target} ${public})
    endif()
    set(export LockstepLibTorchTargets)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_LIBTORCH_PARTS ${name})
  else()
    set(export LockstepTargets)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_PARTS ${name})
  endif()
  if(LOCKSTEP_INSTALL)
    install(TARGETS ${target} EXPORT ${export} ARCHIVE DESTINATION lib)
  endif()
endfunction()

# CUDA kernels of a part, where LibTorch has CUDA:
#
#   lockstep_cuda_kernels(comm SOURCES codecs/block_kernels.cu USERS quantized.cpp)
#
# USERS are the part's .cpp files that launch them, which see LOCKSTEP_HAVE_CUDA; OPTIONS are for nvcc.
# The kernels are objects of their own: nvcc takes none of the C++ compiler's options, and what is
# linked calls the CUDA runtime that LibTorch has. C++17, as older versions of CMake cannot ask nvcc for
# more.
function(lockstep_cuda_kernels part)
  cmake_parse_arguments(KERNELS "" "" "SOURCES;USERS;OPTIONS" ${ARGN})
  set(target lockstep_${part}_cuda)
  add_library(${target} OBJECT ${KERNELS_SOURCES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE ${KERNELS_OPTIONS})
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
  target_sources(lockstep_${part} PRIVATE $<TARGET_OBJECTS:${target}>)
  set_source_files_properties(${KERNELS_USERS} PROPERTIES
    COMPILE_DEFINITIONS LOCKSTEP_HAVE_CUDA SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# A part of Lockstep: one folder, one namespace, one library target.
#
#   lockstep_part(store USES net)                   without LibTorch
#   lockstep_part(mesh USES comm LIBTORCH)          with LibTorch
#
# Compiles every .cpp of the folder it is called in; SOURCES overrides that. USES names the other
# parts it may include, and must agree with the arrows in ARCHITECTURE.md.
function(lockstep_part name)
  cmake_parse_arguments(PART "LIBTORCH" "" "USES;LINKS;SOURCES" ${ARGN})
  if(PART_LIBTORCH AND NOT LOCKSTEP_LIBTORCH)
    return()
  endif()
  if(NOT PART_SOURCES)
    file(GLOB PART_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  endif()
  set(target lockstep_${name})
  add_library(${target} STATIC ${PART_SOURCES})
  add_library(Lockstep::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:lockstep_compiler> ${PART_LINKS})
  foreach(used IN LISTS PART_USES)
    target_link_libraries(${target} PUBLIC lockstep_${used})
  endforeach()
  if(PART_LIBTORCH)
    target_link_libraries(${target} PUBLIC lockstep_torch)
  endif()
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_PARTS ${target})
endfunction()

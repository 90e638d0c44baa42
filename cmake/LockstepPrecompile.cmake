# Large headers, compiled once for all targets that include them.
#
#   lockstep_precompile(name LINKS library… HEADERS <header>…)
#   lockstep_reuse(target name)
#
# The users of one must be compiled with the same flags as it is, which come from LINKS. Every user
# pays for the templates that it leaves to instantiate, so that a set is no larger than what most of
# its users need.
function(lockstep_precompile name)
  if(NOT LOCKSTEP_PRECOMPILED_HEADERS)
    return()
  endif()
  cmake_parse_arguments(PRECOMPILE "" "" "LINKS;HEADERS" ${ARGN})
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/${name}.cpp CONTENT "")
  add_library(${name} OBJECT ${PROJECT_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PRIVATE ${PRECOMPILE_LINKS})
  target_precompile_headers(${name} PRIVATE ${PRECOMPILE_HEADERS})
endfunction()

function(lockstep_reuse target name)
  if(LOCKSTEP_PRECOMPILED_HEADERS)
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()

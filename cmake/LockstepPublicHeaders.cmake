# The headers that are installed: lockstep/lockstep.h, the public ones that it includes (docs/api.md says
# what is in each), and whatever of ours these include, which is internal and may change any day.
#
#   lockstep_installed_headers(<variable>)   relative to the project
function(lockstep_installed_headers variable)
  set(found "")
  set(open lockstep/lockstep.h)
  while(open)
    list(POP_FRONT open header)
    if(header IN_LIST found)
      continue()
    endif()
    list(APPEND found ${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} lines REGEX "^#include <lockstep/")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "#include <(lockstep/[^>]+)>.*" "\\1" included "${line}")
      list(APPEND open ${included})
    endforeach()
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
  endwhile()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

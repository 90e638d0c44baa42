# Run as a script: installs `build`, then configures, builds and runs `project` in `work`.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${build} --prefix ${work}/prefix)
# The program and the package are of one version.
execute_process(COMMAND ${work}/prefix/bin/lockstep --version OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)
set(PACKAGE_FIND_VERSION 0)
include(${work}/prefix/lib/cmake/Lockstep/LockstepConfigVersion.cmake)
if(NOT said STREQUAL "lockstep ${PACKAGE_VERSION}\n")
  message(FATAL_ERROR "the package is of version ${PACKAGE_VERSION}, and the program says ${said}")
endif()
# Nothing may come from the source tree or the user's package registry. The compiled program runs for a
# moment: optimising it would take longer.
run(${CMAKE_COMMAND} -S ${project} -B ${work}/build -G ${generator}
    -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS_RELEASE=-DNDEBUG
    -D CMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)

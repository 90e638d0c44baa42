# Run as a script: builds and runs `project` in `work`. The project takes Lockstep in from `source` by
# `take_in` and links `part`. Unless `torch_dir` is empty, it finds that LibTorch through a folder of
# CMAKE_PREFIX_PATH.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${work})
set(options -D LOCKSTEP_LIBTORCH=OFF)
# What is compiled runs for a moment: optimising it would take longer.
if(torch_dir)
  file(WRITE ${work}/libtorch/share/cmake/Torch/TorchConfig.cmake
    "include(\"${torch_dir}/TorchConfig.cmake\")\n")
  set(options -D CMAKE_PREFIX_PATH=${work}/libtorch -D CMAKE_CXX_FLAGS=-DWITH_LIBTORCH)
endif()
run(${CMAKE_COMMAND} -S ${project} -B ${work}/build -G ${generator} -D CMAKE_CXX_COMPILER=${compiler}
    -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS_RELEASE=-DNDEBUG -D CMAKE_UNITY_BUILD=ON
    -D LOCKSTEP_SOURCE=${source} -D TAKE_IN=${take_in} -D PART=${part}
    ${options})
if(torch_dir)
  file(STRINGS ${work}/build/CMakeCache.txt found REGEX "^Torch_DIR:PATH=${work}/libtorch/")
  if(NOT found)
    message(FATAL_ERROR "the LibTorch in CMAKE_PREFIX_PATH was not taken")
  endif()
endif()
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)
# Checks that nothing was built that the project does not link.
file(GLOB_RECURSE libraries ${work}/build/*.a)
foreach(library IN LISTS libraries)
  if(library MATCHES "liblockstep_(train|elastic|launch|cli|models)")
    message(FATAL_ERROR "${library} was built, which nobody asked for")
  endif()
endforeach()

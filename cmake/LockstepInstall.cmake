# What `cmake --install` puts in place: headers, libraries, programs (cli/ adds those), and the
# package that find_package(Lockstep) reads.
include(CMakePackageConfigHelpers)
set(package_folder lib/cmake/Lockstep)

include(LockstepPublicHeaders)
lockstep_installed_headers(installed_headers)
foreach(header IN LISTS installed_headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${header} DESTINATION include/${folder})
endforeach()
get_property(LOCKSTEP_PARTS GLOBAL PROPERTY LOCKSTEP_PARTS)
get_property(LOCKSTEP_LIBTORCH_PARTS GLOBAL PROPERTY LOCKSTEP_LIBTORCH_PARTS)
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${package_folder})
if(LOCKSTEP_LIBTORCH_PARTS)
  install(EXPORT LockstepLibTorchTargets NAMESPACE Lockstep:: DESTINATION ${package_folder})
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/LockstepTorchTarget.cmake DESTINATION ${package_folder})
endif()

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/LockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Before 1.0 a new minor version may break its users.
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
              ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake
        DESTINATION ${package_folder})

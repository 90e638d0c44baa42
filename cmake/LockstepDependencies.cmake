# Everything comes from the system's packages; nothing is vendored.
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
# A header is all that is needed of it.
find_path(LOCKSTEP_XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
mark_as_advanced(LOCKSTEP_XXHASH_INCLUDE_DIR)
find_package(CLI11 REQUIRED)
if(LOCKSTEP_TESTS)
  find_package(GTest REQUIRED)
endif()

if(LOCKSTEP_LIBTORCH)
  include(LockstepTorch)
  include(LockstepEngines)
endif()

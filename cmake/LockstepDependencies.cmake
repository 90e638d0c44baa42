# Everything comes from the system's packages; nothing is vendored.
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
if(LOCKSTEP_TESTS)
  find_package(GTest REQUIRED)
endif()

if(LOCKSTEP_LIBTORCH)
  include(LockstepTorch)
  include(LockstepEngines)
endif()

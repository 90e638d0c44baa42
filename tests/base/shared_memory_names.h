// The names of ours in shared memory.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace lockstep::testing {

// Leaves out the files of tests that run at the same time, which are called lockstep-test-….
inline std::vector<std::string> shared_memory_names() {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored))
    if (const std::string name = entry.path().filename();
        name.find("lockstep") != std::string::npos && !name.starts_with("lockstep-test-"))
      names.push_back(name);
  return names;
}

}  // namespace lockstep::testing

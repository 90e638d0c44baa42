// Whether there is something at a path. What cannot be looked at counts as not there.
#pragma once

#include <filesystem>

namespace lockstep {

inline bool is_there(const std::filesystem::path& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown);
}

}  // namespace lockstep

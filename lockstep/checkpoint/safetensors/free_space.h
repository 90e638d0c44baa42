// Whether a disk has room, asked before it is filled.
#pragma once

#include <cstdint>
#include <filesystem>

namespace lockstep::checkpoint {

// FileError with both numbers where the file system of `folder` has fewer than `bytes` left for
// this user. Silent where it does not say (some network file systems): then the write tells.
void check_free_space(const std::filesystem::path& folder, std::uint64_t bytes);

}  // namespace lockstep::checkpoint

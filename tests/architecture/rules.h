// The rules that the source tree has to keep.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::architecture {

// Every place in the tree at `root` that breaks a rule of ARCHITECTURE.md, each as one line that
// starts with the file and, where it applies, the line number.
std::vector<std::string> violations(const std::filesystem::path& root);

}  // namespace lockstep::architecture

// What the source tree says of its parts beside the table: CMake's targets, and namespaces.
#pragma once

#include <filesystem>
#include <istream>
#include <map>
#include <string>
#include <vector>

namespace lockstep::architecture {

// A call of lockstep_part() (cmake/LockstepPart.cmake).
struct Target {
  std::string name;
  std::filesystem::path file;  // relative to the tree
  std::vector<std::string> uses;
  bool libtorch = false;
};

std::vector<Target> read_targets(const std::filesystem::path& root);

// The namespaces in which a file defines something, with the line of the first definition in each.
// Forward declarations of other parts' classes are none.
std::map<std::string, int> defined_namespaces(std::istream& source);

}  // namespace lockstep::architecture

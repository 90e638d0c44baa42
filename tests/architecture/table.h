// The table of parts in ARCHITECTURE.md.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::architecture {

struct Part {
  std::string name;                // its first path, a folder such as "store" or "comm/types"
  std::vector<std::string> paths;  // that path, and paths in each folder such as "models/*/spec"
  std::vector<std::string> may_include;  // names of other parts
  bool libtorch = false;
};

struct Table {
  std::vector<Part> parts;            // in the table's order, lowest first
  std::vector<std::string> mistakes;  // mistakes in the table itself

  // The part that a file belongs to, which is the one with the longest path that holds the file.
  // `file` is relative to lockstep/ ("comm/call.h"), or starts with "cli/". Null if no part
  // holds it.
  const Part* part_of(const std::string& file) const;
  const Part* named(const std::string& name) const;
};

Table read_table(const std::filesystem::path& markdown);

}  // namespace lockstep::architecture

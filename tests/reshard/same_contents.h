// Checks that two checkpoints, in any layouts, have the same tensors to the bit.
#pragma once

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/checkpoint/format/reader.h>

#include <tests/ranks/cells.h>

namespace lockstep::reshard {

inline std::vector<std::byte> whole_tensor(checkpoint::CheckpointReader& reader,
                                           const std::string& name) {
  const auto& record = *reader.find(name);
  const auto placement = mesh::Placement::full(record.shape);
  std::vector<std::byte> bytes(checkpoint::piece_bytes(record.dtype, placement));
  reader.read(name, placement, bytes);
  return bytes;
}

inline void expect_same_contents(ranks::Cells& cells, const std::filesystem::path& got,
                                 const std::filesystem::path& wanted) {
  checkpoint::CheckpointReader mine(got), right(wanted);
  cells.expect(mine.manifest().tensors.size() == right.manifest().tensors.size(),
               "the number of tensors is another");
  for (const auto& [name, record] : right.manifest().tensors)
    if (mine.find(name) == nullptr)
      cells.expect(false, name + " is missing");
    else {
      const auto here = whole_tensor(mine, name), there = whole_tensor(right, name);
      // As tests are not optimised, == would look at one byte after the other.
      cells.expect(
          here.size() == there.size() && std::memcmp(here.data(), there.data(), here.size()) == 0,
          name + " is not the same to the bit");
    }
}

}  // namespace lockstep::reshard

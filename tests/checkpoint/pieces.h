// Checkpoints whose tensors are cut into pieces at random, as if by ranks.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/piece_file.h>

namespace lockstep::testing {

using checkpoint::DType;
using mesh::Placement;

// A tensor of bytes, each of which depends on its place.
struct WholeTensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

inline WholeTensor random_tensor(DType dtype, std::vector<std::int64_t> shape,
                                 std::mt19937& random) {
  const Placement whole = Placement::full(shape);
  std::vector<std::byte> bytes(checkpoint::piece_bytes(dtype, whole));
  for (std::byte& one : bytes) one = static_cast<std::byte>(random());
  return {dtype, std::move(shape), std::move(bytes)};
}

// The elements that a placement names, in the placement's order.
inline std::vector<std::byte> part_of(const WholeTensor& tensor, const Placement& placement) {
  const std::size_t size = checkpoint::bits_of(tensor.dtype) / 8;
  std::vector<std::byte> part;
  for (std::int64_t i = 0; i < placement.elements(); ++i) {
    const auto at = static_cast<std::size_t>(placement.logical_index(i)) * size;
    part.insert(part.end(), tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at),
                tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at + size));
  }
  return part;
}

// Cuts all of a tensor along one dim and then in the flat order, each at random.
inline std::vector<Placement> random_cut(const std::vector<std::int64_t>& shape,
                                         std::mt19937& random) {
  std::vector<Placement> parts = {Placement::full(shape)};
  if (!shape.empty() && random() % 2 == 0) {
    const int dim = static_cast<int>(random() % shape.size());
    const int count = 1 + static_cast<int>(random() % 3);
    parts.clear();
    for (int i = 0; i < count; ++i) parts.push_back(Placement::full(shape).cut_dim(dim, i, count));
  }
  if (random() % 2 == 0) return parts;
  std::vector<Placement> flat;
  const int count = 1 + static_cast<int>(random() % 4);
  for (const Placement& part : parts)
    for (int i = 0; i < count; ++i) flat.push_back(part.cut_flat(i, count));
  return flat;
}

// Writes pieces of each tensor to the files in turn.
inline void write_checkpoint(const std::filesystem::path& folder,
                             const std::map<std::string, WholeTensor>& tensors,
                             const std::map<std::string, std::vector<Placement>>& cuts,
                             int num_files = 3) {
  std::filesystem::create_directories(folder);
  std::vector<std::vector<checkpoint::PieceInMemory>> files(static_cast<std::size_t>(num_files));
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory;
  std::size_t next = 0;
  for (const auto& [name, tensor] : tensors)
    for (const Placement& placement : cuts.at(name)) {
      // For a tensor without elements, one piece says that it exists.
      if (placement.empty() && !(tensor.bytes.empty() && &placement == &cuts.at(name).front()))
        continue;
      memory.push_back(std::make_unique<std::vector<std::byte>>(part_of(tensor, placement)));
      files[next++ % files.size()].push_back(
          {name, tensor.dtype, tensor.shape, placement, *memory.back()});
    }
  checkpoint::Manifest manifest;
  manifest.state.step = 7;
  for (int file = 0; file < num_files; ++file)
    add(manifest, checkpoint::write_piece_file(folder, checkpoint::piece_file_name(file),
                                               files[static_cast<std::size_t>(file)]));
  add(manifest, checkpoint::write_text_file(folder, "config.json", "{\"a\": 1}"));
  write_durably(folder / checkpoint::kManifestFile, to_text(manifest));
}

}  // namespace lockstep::testing

// Writes a safetensors file, tensor by tensor, without holding it in memory.
//
//   SafetensorsWriter writer(path, {{"weight", DType::f32, {2, 3}}});
//   for (const TensorEntry& entry : writer.entries()) writer.write(bytes_of(entry.name));
//   writer.commit();
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/safetensors/header.h>

namespace lockstep::checkpoint {

// FileError with both numbers where the file system of `folder` has fewer than `bytes` left for
// this user. Does nothing on file systems that do not tell (some network ones): the write will fail
// instead.
void check_free_space(const std::filesystem::path& folder, std::uint64_t bytes);

struct TensorDeclaration {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
};

// The header for such a file, its length first, padded so that data begins at a multiple of 8, and
// the entries in the order of their bytes. The largest elements come first, otherwise as declared,
// so that every tensor is aligned to its element. UsageError for names that are there twice or are
// no UTF-8, for shapes that make no sense, and for more than a header may hold.
struct SafetensorsLayout {
  std::string header;
  std::vector<TensorEntry> entries;

  std::uint64_t file_bytes() const {
    return header.size() + (entries.empty() ? 0 : entries.back().end);
  }
};
SafetensorsLayout plan_safetensors(std::span<const TensorDeclaration> tensors,
                                   const Metadata& metadata);

// Ownership: the file appears under its name when commit() returns; dropped before, it leaves
// nothing behind. Threading: one thread. Failure: FileError for the disk (also before anything is
// written, where there is not enough room), UsageError as plan_safetensors, and where the bytes
// written are not those declared.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorDeclaration> tensors,
                    const Metadata& metadata = {});

  // The tensors in the order in which their bytes have to be written.
  const std::vector<TensorEntry>& entries() const { return layout_.entries; }

  // Writes the next bytes, which may be a part of a tensor or several tensors.
  void write(std::span<const std::byte> bytes);

  void commit(DurableFile::Folder folder = DurableFile::Folder::is_synced);

 private:
  std::filesystem::path path_;
  SafetensorsLayout layout_;
  std::uint64_t written_ = 0;  // of the data
  DurableFile file_;
};

}  // namespace lockstep::checkpoint

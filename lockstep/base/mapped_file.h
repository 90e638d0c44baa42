// A file's bytes in memory, read by the kernel where they are looked at.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace lockstep {

// Ownership: unmaps when destroyed; spans into it are valid until then. Threading: read-only.
// Failure: as RegularFile, in the constructor.
// A file that someone shortens while it is mapped ends the process when the lost part is read
// (SIGBUS), as with every mapping.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::size_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace lockstep

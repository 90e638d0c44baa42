// Reading files whose names somebody else chose: data, configs, checkpoints, models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace lockstep {

// Whether something exists at a path. What cannot be looked at counts as missing.
inline bool is_there(const std::filesystem::path& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown);
}

// The one way to open a file for reading whose name somebody else chose. It follows symbolic links
// and accepts regular files only: opening a FIFO could wait for a writer for ever, and a device or
// a socket has no contents to read.
//
// Ownership: owns the descriptor. Threading: any. Failure: UsageError in the constructor, naming
// the file, where it is missing, unreadable or not a regular file.
class RegularFile {
 public:
  explicit RegularFile(const std::filesystem::path& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&&) = delete;

  int fd() const { return fd_; }
  // The size when it was opened.
  std::uint64_t size() const { return size_; }

 private:
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

// A file's bytes in memory, which the kernel reads when they are looked at.
//
// Ownership: unmaps when destroyed; spans into it are valid until then. Threading: read-only.
// Failure: as RegularFile, in the constructor. A file that someone shortens while it is mapped ends
// the process when the lost part is read (SIGBUS), as with every mapping.
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

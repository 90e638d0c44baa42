// The one way to open a file for reading whose name somebody else chose: data, configs,
// checkpoints, models.
#pragma once

#include <cstdint>
#include <filesystem>

namespace lockstep {

// Only regular files, through any symbolic links: opening a FIFO would wait for a writer, perhaps
// for ever, and a device or a socket has no contents to speak of.
//
// Ownership: of the descriptor. Threading: any. Failure: UsageError in the constructor, naming the
// file, where it is missing, unreadable or something else than a regular file.
class RegularFile {
 public:
  explicit RegularFile(const std::filesystem::path& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&&) = delete;

  int fd() const { return fd_; }
  // When it was opened.
  std::uint64_t size() const { return size_; }

 private:
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace lockstep

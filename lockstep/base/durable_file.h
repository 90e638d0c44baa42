// Files that are complete or do not exist: they are written under another name, synced and renamed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include <lockstep/base/error.h>

namespace lockstep {

// A failure of the machine's disk, which is full, read-only or gone. Names the file and the
// system's reason.
class FileError : public Error {
 public:
  using Error::Error;

  template <typename... Args>
  explicit FileError(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::format(format, std::forward<Args>(args)...)) {}
};

// A file that appears under its name when commit() returns, complete and on disk, in place of what
// was there; dropped without commit() it leaves nothing behind. One thread.
class DurableFile {
 public:
  enum class Length {
    short_text,
    much_data,  // many megabytes, which bypass the page cache where the file system allows it
  };
  explicit DurableFile(std::filesystem::path path, Length length = Length::short_text);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  // Puts what was written on disk, under the other name: commit() then has little left to do
  // between a check of the caller's and the rename.
  void sync();

  // `is_left` is for one of many files that nobody looks for before all are there: the caller then
  // syncs their folder once.
  enum class Folder { is_synced, is_left };
  void commit(Folder folder = Folder::is_synced);

 private:
  class DirectOutput;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::unique_ptr<DirectOutput> direct_;  // for much data
};

// Writes a whole file at once.
void write_durably(const std::filesystem::path& path, std::string_view text,
                   DurableFile::Folder folder = DurableFile::Folder::is_synced);

// Makes sure that renamed, new and removed entries of a folder are on disk.
void sync_folder(const std::filesystem::path& folder);

}  // namespace lockstep

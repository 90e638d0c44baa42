// Files and folders that are whole or not there: written under another name, synced, renamed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include <lockstep/base/direct_output.h>
#include <lockstep/base/error.h>

namespace lockstep {

// What the machine's disk did: full, read-only, gone. Names the file and the system's reason.
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
    much_data,  // many megabytes, which would only be in the way in the page cache
  };
  explicit DurableFile(std::filesystem::path path, Length length = Length::short_text);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  // Of many files in one folder, which nobody looks for before all are there, the folder is synced
  // once, by who has it.
  enum class Folder { is_synced, is_left };
  void commit(Folder folder = Folder::is_synced);

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int fd_ = -1;
  std::unique_ptr<DirectOutput> direct_;  // of much data
};

// A whole file at once.
void write_durably(const std::filesystem::path& path, std::string_view text,
                   DurableFile::Folder folder = DurableFile::Folder::is_synced);

// Puts what was renamed, made or removed in a folder on disk.
void sync_folder(const std::filesystem::path& folder);

}  // namespace lockstep

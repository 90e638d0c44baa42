// A file that grows by whole records, each in one write: a kill cuts off at most the last one, and
// a disk that is full for a while nothing.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace lockstep::observe {

// A record that could not be written leaves the file as it was, and is kept, with up to a megabyte
// of others, until a later call has room for them.
//
// Ownership: closes the file when destroyed. Threading: one thread. Failure: FileError naming the
// file and the system's reason.
class AppendedFile {
 public:
  enum class Existing { append, refuse };

  // With Existing::refuse, nothing is opened where the file is there already: refused() then says
  // so.
  AppendedFile(std::filesystem::path path, Existing existing);
  ~AppendedFile();
  AppendedFile(AppendedFile&& other) noexcept;
  AppendedFile& operator=(AppendedFile&& other) = delete;

  bool refused() const { return fd_ < 0; }
  void append(std::string_view record);
  // Those that are kept, if any.
  void append_kept();
  // Goes on with what has the file's name now.
  void reopen();
  void sync();

  const std::filesystem::path& path() const { return path_; }
  // Records that were given up, as a megabyte of others was waiting.
  std::size_t num_lost() const { return num_lost_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::string kept_;
  std::size_t num_lost_ = 0;
};

}  // namespace lockstep::observe

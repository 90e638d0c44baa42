// A file that grows by whole records, each in one write: a kill cuts off at most the last one.
#pragma once

#include <filesystem>
#include <string_view>

namespace lockstep::observe {

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
  AppendedFile& operator=(AppendedFile&& other) noexcept;

  bool refused() const { return fd_ < 0; }
  void append(std::string_view record);
  void sync();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace lockstep::observe

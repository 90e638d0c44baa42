#include <lockstep/train/run_folder.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include <lockstep/base/durable_file.h>

namespace lockstep::train {

namespace {

void make_writable(const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw FileError("cannot make the run's folder '{}': {}", folder.string(), failed.message());
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    throw FileError("nothing can be written in the run's folder '{}': {}", folder.string(),
                    std::strerror(errno));
}

}  // namespace

FolderLock RunFolder::claim() const {
  make_writable(options_.output);
  FolderLock lock(options_.output);
  make_writable(checkpoints());
  return lock;
}

}  // namespace lockstep::train

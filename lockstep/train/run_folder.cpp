#include <lockstep/train/run_folder.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/environment.h>
#include <lockstep/net/secret.h>

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

FolderHolder this_generation() {
  return {.job = net::job_identity(), .generation = read_launch_environment().generation};
}

std::shared_ptr<const FolderLock> RunFolder::claim() const {
  make_writable(options_.output);
  std::optional<FolderHolder> holder = this_generation();
  if (holder->job.empty()) holder.reset();
  auto lock = std::make_shared<const FolderLock>(options_.output, holder);
  make_writable(checkpoints());
  return lock;
}

}  // namespace lockstep::train

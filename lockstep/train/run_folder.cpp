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
#include <lockstep/net/job_identity.h>

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

std::shared_ptr<const FolderLock> RunFolder::claim() const {
  make_writable(options_.output);
  std::optional<FolderHolder> holder;
  if (std::string job = net::job_identity(); !job.empty())
    holder = {.job = std::move(job), .generation = read_launch_environment().generation};
  auto lock = std::make_shared<const FolderLock>(options_.output, holder);
  make_writable(checkpoints());
  return lock;
}

}  // namespace lockstep::train

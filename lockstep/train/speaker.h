// Lines about a run, for people.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/file.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

// Prints lines about the run, on the main rank.
class Speaker {
 public:
  Speaker(const DistributedManager& dist, int fd) : fd_(dist.is_main() ? fd : -1) {}

  template <typename... Args>
  void operator()(fmt::format_string<Args...> format, Args&&... args) {
    if (fd_ < 0) return;
    const std::string line = fmt::format(format, std::forward<Args>(args)...) + "\n";
    for (std::string_view rest = line; !rest.empty();) {
      const ssize_t written = ::write(fd_, rest.data(), rest.size());
      if (written >= 0) {
        rest.remove_prefix(static_cast<std::size_t>(written));
      } else if (errno != EINTR) {
        // If the stream takes no bytes for now, only this line is lost.
        if (errno != EAGAIN) error_ = errno;
        return;
      }
    }
  }

  // Where a file is, if it is there.
  void file(const char* what, const std::filesystem::path& path) {
    if (is_there(path)) (*this)("{:<8} {}", what, path.string());
  }

  // As ProgressBar::error().
  int error() const { return error_; }

 private:
  int fd_;
  int error_ = 0;
};

// How a run has ended; `note` follows the losses.
void say_end(Speaker& say, const TrainConfig& config, const TrainingResult& result,
             const std::string& note = "");
// Where its files are.
void say_files(Speaker& say, const TrainerOptions& options, const TrainingResult& result);
// The result, with what could not be said.
TrainingResult said_at_the_end(Speaker& say, TrainingResult result);

}  // namespace lockstep::train

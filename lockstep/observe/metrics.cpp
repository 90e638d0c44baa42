#include <lockstep/observe/metrics.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>

namespace lockstep::observe {

template <typename Action>
void Metrics::each(const Action& action, Repeat warnings) {
  std::erase_if(sinks_, [&](Output& output) {
    try {
      action(*output.sink);
      if (!std::exchange(output.fails, false)) return false;
      const std::size_t lost = output.sink->num_lost();
      if (const auto more = lost - std::exchange(output.num_told_lost, lost); more > 0)
        log::warn("metrics are written again; {} records are lost, as too many waited", more);
      else
        log::info("metrics are written again");
      return false;
    } catch (const FileError& error) {
      if (!std::exchange(output.fails, true))
        log::warn("metrics: {}; training goes on, and it is tried again", error.what());
      else if (warnings == Repeat::yes)
        log::warn("metrics: {}; what waits is lost should the run end now", error.what());
      return false;
    } catch (const std::exception& error) {
      log::warn("metrics: {}; training goes on without this output", error.what());
      return true;
    }
  });
}

void Metrics::record(std::int64_t step, std::span<const Metric> metrics) {
  each([&](MetricSink& sink) { sink.record(step, metrics); });
}

void Metrics::flush() {
  each([](MetricSink& sink) { sink.flush(); }, Repeat::yes);
}

AppendedFile::AppendedFile(std::filesystem::path path, Existing existing) : path_(std::move(path)) {
  const int refuse = existing == Existing::refuse ? O_EXCL : 0;
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | refuse, 0666);
  if (fd_ < 0 && !(refuse != 0 && errno == EEXIST))
    throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
}

AppendedFile::~AppendedFile() {
  if (fd_ >= 0) ::close(fd_);
}

AppendedFile::AppendedFile(AppendedFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      kept_(std::move(other.kept_)),
      num_lost_(other.num_lost_) {}

void AppendedFile::append(std::string_view record) {
  constexpr std::size_t kMostKept = 1 << 20;
  const bool has_room = kept_.empty() || kept_.size() + record.size() <= kMostKept;
  if (has_room)
    kept_.append(record);
  else
    ++num_lost_;
  append_kept();
}

void AppendedFile::reopen() {
  const int fd = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
  ::close(std::exchange(fd_, fd));
}

void AppendedFile::append_kept() {
  struct stat before {};
  const bool can_be_cut = ::fstat(fd_, &before) == 0 && S_ISREG(before.st_mode);
  for (std::string_view rest = kept_; !rest.empty();) {
    const ssize_t written = ::write(fd_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int reason = errno;
      // A torn record is cut off again. A pipe cannot be cut, and must not get its bytes twice.
      if (!can_be_cut)
        kept_.clear();
      else if (::ftruncate(fd_, before.st_size) != 0)
        kept_.erase(0, kept_.size() - rest.size());
      throw FileError("cannot write '{}': {}", path_.string(), std::strerror(reason));
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  kept_.clear();
}

void AppendedFile::sync() {
  append_kept();
  // Pipes and some file systems cannot sync, and say EINVAL.
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS)
    throw FileError("cannot sync '{}': {}", path_.string(), std::strerror(errno));
}

}  // namespace lockstep::observe

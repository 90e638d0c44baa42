#include <lockstep/launch/processes/flight_directory.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>

namespace lockstep::launch {

namespace fs = std::filesystem;

namespace {

bool is_empty(const std::string& directory) {
  std::error_code unreadable;
  return fs::directory_iterator(directory, unreadable) == fs::directory_iterator();
}

constexpr const char* kPrefix = "lockstep-flight-";
// A job that began just now may not have locked its folder yet.
constexpr std::chrono::seconds kJustMade(60);

// Locks the folder; empty where another process holds a conflicting lock, or where it is no folder
// of this user.
net::Fd locked(const std::string& folder, int how) {
  net::Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0 || info.st_uid != ::geteuid() ||
      ::flock(fd.get(), how | LOCK_NB) != 0)
    return {};
  return fd;
}

// Dumps of failed jobs are read soon or never.
void remove_old_ones(const std::string& parent) {
  std::vector<std::pair<fs::file_time_type, std::string>> old;
  std::error_code ignored;
  for (auto it = fs::directory_iterator(parent, ignored);
       !ignored && it != fs::directory_iterator(); it.increment(ignored)) {
    if (!it->path().filename().string().starts_with(kPrefix)) continue;
    std::error_code unknown;
    const auto when = it->last_write_time(unknown);
    if (!unknown && when < fs::file_time_type::clock::now() - kJustMade)
      old.emplace_back(when, it->path().string());
  }
  if (old.size() <= FlightDirectory::kKept) return;
  std::sort(old.begin(), old.end(), std::greater<>());
  for (std::size_t i = FlightDirectory::kKept; i < old.size(); ++i)
    if (const net::Fd unused = locked(old[i].second, LOCK_EX))
      fs::remove_all(old[i].second, ignored);
}

}  // namespace

FlightDirectory::FlightDirectory() {
  if (const auto wanted = environment_variable("LOCKSTEP_FLIGHT_DIR")) {
    std::error_code failed;
    fs::create_directories(*wanted, failed);
    if (failed)
      throw UsageError("LOCKSTEP_FLIGHT_DIR is '{}', which cannot be made: {}", *wanted,
                       failed.message());
    path_ = root_ = fs::absolute(*wanted).string();
    return;
  }
  const std::string parent = temporary_directory();
  remove_old_ones(parent);
  root_ = fmt::format("{}/{}XXXXXX", parent, kPrefix);
  if (::mkdtemp(root_.data()) == nullptr)
    throw UsageError("cannot make a folder in '{}': {}; set TMPDIR to one that can be written",
                     parent, std::strerror(errno));
  in_use_ = locked(root_, LOCK_SH);
  path_ = root_;
  temporary_ = true;
}

FlightDirectory::~FlightDirectory() {
  if (temporary_) remove_without_dumps(root_);
}

void FlightDirectory::begin(int generation) {
  if (generation == 0 || is_empty(root_)) return;
  path_ = (fs::path(root_) / fmt::format("generation_{}", generation)).string();
  std::error_code failed;
  fs::create_directory(path_, failed);
  if (failed) path_ = root_;  // dumps that are mixed are better than none
}

bool FlightDirectory::tells_of_failures() const {
  return temporary_ && flight::tells_of_failures(path_);
}

void FlightDirectory::clear() const {
  std::error_code ignored;
  if (temporary_ && path_ == root_) fs::remove_all(root_, ignored);
}

void remove_without_dumps(const std::string& directory) {
  if (!flight::list_dumps(directory).empty()) return;
  std::error_code ignored;
  for (auto it = fs::directory_iterator(directory, ignored);
       !ignored && it != fs::directory_iterator(); it.increment(ignored))
    if (it->is_directory(ignored) && !flight::list_dumps(it->path()).empty()) return;
  fs::remove_all(directory, ignored);
}

}  // namespace lockstep::launch

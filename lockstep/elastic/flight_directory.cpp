#include <lockstep/elastic/flight_directory.h>

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

bool is_empty(const std::string& directory) {
  std::error_code unreadable;
  return fs::directory_iterator(directory, unreadable) == fs::directory_iterator();
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
  root_ = (fs::temp_directory_path() / "lockstep-flight-XXXXXX").string();
  if (::mkdtemp(root_.data()) == nullptr)
    throw UsageError("cannot make a folder in '{}': {}; set TMPDIR to one that can be written",
                     fs::temp_directory_path().string(), std::strerror(errno));
  path_ = root_;
  temporary_ = true;
}

FlightDirectory::~FlightDirectory() {
  if (temporary_) remove_if_unused(root_);
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

void remove_if_unused(const std::string& directory) {
  std::error_code ignored;
  for (auto it = fs::directory_iterator(directory, ignored);
       !ignored && it != fs::directory_iterator(); it.increment(ignored))
    ::rmdir(it->path().c_str());
  ::rmdir(directory.c_str());
}

}  // namespace lockstep::elastic

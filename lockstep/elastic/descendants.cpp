#include <lockstep/elastic/descendants.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/net/fd.h>

namespace lockstep::elastic {

namespace {

// The parent as /proc/<pid>/stat has it: "123 (name, which may hold anything) S 45 ...".
pid_t parent_of(const char* pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%s/stat", pid);
  const net::Fd file(::open(path, O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t size = file ? ::read(file.get(), text, sizeof(text) - 1) : -1;
  if (size <= 0) return -1;
  text[size] = '\0';
  const char* name_end = std::strrchr(text, ')');
  int parent = -1;
  if (name_end == nullptr || std::sscanf(name_end + 1, " %*c %d", &parent) != 1) return -1;
  return parent;
}

std::vector<pid_t> children_but(const std::vector<pid_t>& spared) {
  std::vector<pid_t> found;
  DIR* proc = ::opendir("/proc");
  if (proc == nullptr) return found;
  const pid_t self = ::getpid();
  while (const dirent* entry = ::readdir(proc)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    if (parent_of(entry->d_name) != self) continue;
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (std::find(spared.begin(), spared.end(), pid) == spared.end()) found.push_back(pid);
  }
  ::closedir(proc);
  return found;
}

}  // namespace

void adopt_orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    throw UsageError("cannot become the parent of orphaned processes: {}", std::strerror(errno));
}

std::vector<pid_t> kill_descendants(const Deadline& deadline, const std::vector<pid_t>& spared) {
  for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(20))) {
    // How those end that are spared is for their owner to hear.
    std::vector<pid_t> found = children_but(spared);
    for (const pid_t child : found) ::kill(child, SIGKILL);
    std::erase_if(found, [](pid_t child) { return ::waitpid(child, nullptr, WNOHANG) == child; });
    if (found.empty() && children_but(spared).empty()) return {};
    if (deadline.passed()) return found;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep::elastic

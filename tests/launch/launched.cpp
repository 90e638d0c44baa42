#include "launched.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::launch::testing {

namespace fs = std::filesystem;

namespace {

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

bool is_zombie(const fs::path& process) {
  const std::string stat = read_file(process / "stat");
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos || stat.compare(name_end, 4, ") Z ") == 0;
}

}  // namespace

bool eventually(milliseconds longest, const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(longest);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

Launched::Launched(std::vector<std::string> command, std::vector<std::string> variables) {
  std::string name = "/tmp/lockstep-test-XXXXXX";
  LOCKSTEP_CHECK(::mkdtemp(name.data()) != nullptr);
  directory_ = name;
  mark_ = "LOCKSTEP_TEST_MARK=" + name;
  variables.push_back(mark_);
  for (std::string& inherited : whole_environment()) {
    bool changed = false;
    for (const std::string& variable : variables)
      changed |= inherited.starts_with(variable.substr(0, variable.find('=') + 1));
    if (!changed) variables.push_back(std::move(inherited));
  }
  std::vector<char*> words, environment;
  for (std::string& word : command) words.push_back(word.data());
  for (std::string& variable : variables) environment.push_back(variable.data());
  words.push_back(nullptr);
  environment.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND;
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, (directory_ / "out").c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&files, 2, (directory_ / "err").c_str(), kFlags, 0600);
  // The tests' parent may ignore signals, as a shell does for programs in the background; the
  // program under test must not.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP})
    ::sigaddset(&signals, signal);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  // Gives it a process group of its own, as a shell with job control would.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  const int failed =
      posix_spawnp(&pid_, words[0], &files, &attributes, words.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  LOCKSTEP_CHECK(failed == 0, "cannot start {}", command[0]);
}

Launched::~Launched() {
  if (directory_.empty()) return;  // moved from
  for (const pid_t process : alive()) ::kill(process, SIGKILL);
  if (status_ == -1) ::waitpid(pid_, &status_, 0);
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

Launched Launched::run(std::vector<std::string> arguments, std::vector<std::string> variables) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "run"});
  return Launched(std::move(arguments), std::move(variables));
}

void Launched::kill(int signal) const { ::kill(pid_, signal); }

int Launched::wait(milliseconds longest) {
  if (status_ == -1 &&
      !eventually(longest, [&] { return ::waitpid(pid_, &status_, WNOHANG) == pid_; })) {
    status_ = -1;
    return -1;
  }
  return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

std::string Launched::output() const { return read_file(directory_ / "out"); }
std::string Launched::error() const { return read_file(directory_ / "err"); }

bool Launched::says(const std::string& text, milliseconds longest) const {
  return eventually(longest, [&] { return output().find(text) != std::string::npos; });
}

std::vector<pid_t> Launched::alive() const {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0 || is_zombie(entry.path())) continue;
    const std::string environment = std::string(1, '\0') + read_file(entry.path() / "environ");
    if (environment.find('\0' + mark_ + '\0') != std::string::npos) found.push_back(pid);
  }
  return found;
}

bool Launched::stopped(milliseconds longest) const {
  return eventually(longest, [&] {
    const auto processes = alive();
    return std::all_of(processes.begin(), processes.end(), [](pid_t pid) {
      const fs::path process = fs::path("/proc") / std::to_string(pid);
      // The guardian does not react to the terminal.
      return read_file(process / "comm") == "lockstep-guard\n" ||
             read_file(process / "stat").find(") T ") != std::string::npos;
    });
  });
}

bool Launched::all_gone(milliseconds longest) const {
  return eventually(longest, [&] { return alive().empty(); });
}

Folder::Folder(const std::string& parent) {
  std::string name = parent + "/lockstep-test-XXXXXX";
  LOCKSTEP_CHECK(::mkdtemp(name.data()) != nullptr);
  path_ = name;
}

Folder::~Folder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string Folder::write(const std::string& name, const std::string& text, int mode) const {
  const fs::path file = path_ / name;
  std::ofstream(file, std::ios::binary) << text;
  ::chmod(file.c_str(), static_cast<mode_t>(mode));
  return file.string();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> faults_in(const std::string& error) {
  const std::string start = "lockstep: fault ";
  std::vector<std::string> faults;
  for (const std::string& line : lines_of(error))
    if (line.starts_with(start)) faults.push_back(line.substr(start.size()));
  return faults;
}

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace lockstep::launch::testing

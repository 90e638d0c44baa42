// Runs the real program and observes it.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::launch::testing {

// Waits until `condition` holds; false if it does not hold in time.
bool eventually(milliseconds longest, const std::function<bool()>& condition);

// The test program itself, which may be the ranks of a job, too.
inline std::string this_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

// A program whose output goes to files of its own. The destructor kills the remaining processes;
// all of them carry a mark in their environment by which they are found.
class Launched {
 public:
  // Runs `command`; `variables` ("NAME=value") are added to the environment.
  explicit Launched(std::vector<std::string> command, std::vector<std::string> variables = {});
  ~Launched();
  Launched(Launched&&) = default;

  // Runs `lockstep run` with these arguments.
  static Launched run(std::vector<std::string> arguments, std::vector<std::string> variables = {});

  pid_t pid() const { return pid_; }
  void kill(int signal) const;

  // Exit code (128 + signal), or -1 if it has not ended in time.
  int wait(milliseconds longest = milliseconds(120'000));

  // The output so far.
  std::string output() const;
  std::string error() const;

  // Waits until `text` appears in its output.
  bool says(const std::string& text, milliseconds longest = milliseconds(60'000)) const;

  // Pids of all its processes that still exist, without zombies.
  std::vector<pid_t> alive() const;

  // True once all of them are stopped, except the guardian.
  bool stopped(milliseconds longest = milliseconds(60'000)) const;

  // True once none of them exists.
  bool all_gone(milliseconds longest) const;

 private:
  std::filesystem::path directory_;
  std::string mark_;
  pid_t pid_ = -1;
  int status_ = -1;
};

// A folder that goes away with the object.
class Folder {
 public:
  explicit Folder(const std::string& parent = "/tmp");
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::filesystem::path& path() const { return path_; }

  // Writes a file in it; returns its path.
  std::string write(const std::string& name, const std::string& text, int mode = 0644) const;

 private:
  std::filesystem::path path_;
};

std::vector<std::string> lines_of(const std::string& text);

// The machine-readable lines of a job's failures, in order: the JSON in each.
std::vector<std::string> faults_in(const std::string& error);

// How often `part` stands in `text`.
int count_of(const std::string& part, const std::string& text);

}  // namespace lockstep::launch::testing

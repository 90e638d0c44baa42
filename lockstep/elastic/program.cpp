#include <lockstep/elastic/program.h>

#include <unistd.h>

#include <filesystem>
#include <sstream>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

std::string in_working_directory(const std::string& path) {
  std::error_code ignored;
  return fs::absolute(path, ignored).lexically_normal().string();
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

// A name with a slash is that file; one without is looked up in PATH, as a shell does.
std::string find_executable(const std::string& name) {
  std::error_code ignored;
  if (name.find('/') != std::string::npos) {
    if (fs::is_directory(name, ignored))
      throw UsageError("program '{}' is a directory: name a program in it",
                       in_working_directory(name));
    if (!is_file(name))
      throw UsageError("program '{}' does not exist (tried {}): check the path, and build it first",
                       name, in_working_directory(name));
    if (::access(name.c_str(), X_OK) != 0)
      throw UsageError("program '{}' is not executable: run 'chmod +x {}', or name its interpreter "
                       "before it",
                       in_working_directory(name), name);
    return name;
  }
  const std::string path = environment_variable("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  std::istringstream directories(path);
  for (std::string directory; std::getline(directories, directory, ':');) {
    const fs::path candidate = fs::path(directory.empty() ? "." : directory) / name;
    if (is_file(candidate) && ::access(candidate.c_str(), X_OK) == 0) return candidate.string();
  }
  if (is_file(name))
    throw UsageError("program '{}' is in none of the directories of PATH ({}), but there is {}: "
                     "write ./{}",
                     name, path, in_working_directory(name), name);
  throw UsageError("program '{}' does not exist (tried every directory of PATH: {}): check the "
                   "name, or give a path such as ./{}",
                   name, path, name);
}

std::string python() { return environment_variable("PYTHON_EXEC").value_or("python3"); }

}  // namespace

std::vector<std::string> resolve_command(const std::vector<std::string>& words, ProgramKind kind) {
  if (words.empty())
    throw UsageError("no program was given: write it after the flags, for example 'lockstep run "
                     "--nproc-per-node 4 ./my_program'");
  std::vector<std::string> command;
  if (kind == ProgramKind::python_module) {
    command = {find_executable(python()), "-u", "-m"};
  } else if (kind == ProgramKind::automatic && words[0].ends_with(".py")) {
    if (!is_file(words[0]))
      throw UsageError("Python script '{}' does not exist (tried {}): check the path", words[0],
                       in_working_directory(words[0]));
    command = {find_executable(python()), "-u"};  // unbuffered, so that lines appear as written
  } else {
    command = {find_executable(words[0])};
    command.insert(command.end(), words.begin() + 1, words.end());
    return command;
  }
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

}  // namespace lockstep::elastic

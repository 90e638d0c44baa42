#include <cli/torch/relaunch.h>

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::cli {

bool launched() { return read_launch_environment().launcher != Launcher::none; }

int relaunch(const std::string& verb, Arguments arguments, int num_ranks) {
  namespace fs = std::filesystem;
  const fs::path self = fs::read_symlink("/proc/self/exe");
  std::vector<std::string> words = {
      "lockstep", "run", "--nproc-per-node", std::to_string(num_ranks), self.string(), verb};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Beside this program in a build tree; two folders up and in bin where installed.
  const fs::path here = self.parent_path();
  for (const fs::path& launcher :
       {here / "lockstep", here.parent_path().parent_path() / "bin/lockstep"})
    ::execv(launcher.c_str(), argv.data());
  throw UsageError(
      "cannot start ranks: the program lockstep is not beside {} ({}). Start this with "
      "'lockstep run --nproc-per-node {} …' instead",
      self.string(), std::strerror(errno), num_ranks);
}

}  // namespace lockstep::cli

#include <cli/dispatch.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/base/text.h>
#include <lockstep/launch/processes/rank_setup.h>

namespace lockstep::cli {

namespace fs = std::filesystem;

namespace {

// Opens /dev/null in place of each standard stream that the caller has closed: the next file to be
// opened would get its number, and be taken for standard output. Call it before anything is opened.
void open_standard_streams() {
  for (const int wanted : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(wanted, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is the wanted one: those below it are open by now.
    if (::open("/dev/null", O_RDWR) != wanted) return;
  }
}

std::string help(std::span<const Verb> verbs) {
  std::string text =
      "lockstep " LOCKSTEP_VERSION
      ": distributed training for LibTorch\n\nUsage: lockstep VERB [ARGUMENTS]\n\nVerbs:\n";
  for (const Verb& verb : verbs) text += fmt::format("  {:<8} {}\n", verb.name, verb.summary);
  return text + "\n'lockstep VERB --help' tells more. --version prints the version.\n";
}

void complain(std::string_view text) { fmt::print(stderr, "lockstep: {}\n", text); }

int dispatch_or_throw(std::span<const Verb> verbs, int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "{}", help(verbs));
    return kUsageMistake;
  }
  const std::string_view wanted = argv[1];
  if (wanted == "--help" || wanted == "-h" || wanted == "help") {
    fmt::print("{}", help(verbs));
    return 0;
  }
  if (wanted == "--version") {
    fmt::print("lockstep {}\n", LOCKSTEP_VERSION);
    return 0;
  }
  std::vector<std::string_view> names;
  for (const Verb& verb : verbs) {
    if (verb.name == wanted) {
      if (verb.run == nullptr) become_torch_program(verb.name, argv);
      const std::vector<std::string> arguments(argv + 2, argv + argc);
      return verb.run(arguments);
    }
    names.push_back(verb.name);
  }
  throw UsageError("'{}' is no verb of lockstep{}; 'lockstep --help' lists them all", wanted,
                   did_you_mean(wanted, names));
}

}  // namespace

std::filesystem::path torch_program(std::string_view verb) {
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  const fs::path candidates[] = {here / "lockstep-torch",
                                 here.parent_path() / "libexec/lockstep/lockstep-torch"};
  for (const fs::path& candidate : candidates)
    if (fs::exists(candidate)) return candidate;
  throw UsageError("'{}' needs the program lockstep-torch, which is not there: looked for {} and "
                   "{}. Build Lockstep with LibTorch (LOCKSTEP_LIBTORCH=ON), or install all of it",
                   verb, candidates[0].string(), candidates[1].string());
}

void become_torch_program(std::string_view verb, char** argv) {
  const fs::path program = torch_program(verb);
  // Read before main(): they have to be there when the program starts.
  for (const auto& [name, value] : launch::computing_environment())
    set_environment_default(name, value);
  ::execv(program.c_str(), argv);
  throw UsageError("'{}' needs the program {}, which does not start: {}", verb, program.string(),
                   std::strerror(errno));
}

int dispatch(std::span<const Verb> verbs, int argc, char** argv) {
  open_standard_streams();
  try {
    log::set_name("lockstep");
    const int code = dispatch_or_throw(verbs, argc, argv);
    errno = 0;
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    if (errno == EPIPE) return code;  // a reader who has seen enough
    complain(fmt::format("the standard output cannot be written: {}",
                         errno != 0 ? std::strerror(errno) : "an earlier write failed"));
    return code != 0 ? code : 1;
  } catch (const UsageError& error) {
    complain(error.what());
    return kUsageMistake;
  } catch (const std::exception& error) {
    complain(std::ferror(stdout) == 0
                 ? std::string(error.what())
                 : fmt::format("the standard output cannot be written: {}", error.what()));
    return 1;
  }
}

}  // namespace lockstep::cli

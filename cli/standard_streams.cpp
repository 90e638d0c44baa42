#include <cli/standard_streams.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>

namespace lockstep::cli {

void open_standard_streams() {
  for (const int wanted : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(wanted, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is the wanted one: those below it are open by now.
    if (::open("/dev/null", O_RDWR) != wanted) return;
  }
}

}  // namespace lockstep::cli

#include <lockstep/base/final_failure.h>

#include <lockstep/base/error.h>
#include <lockstep/base/launcher_line.h>

namespace lockstep {

void report_final_failure() noexcept {
  try {
    if (const auto line = LauncherLine::inherited()) line->say(LineMessage::Word::final);
  } catch (const Error&) {
    // What is wrong with the environment is told where the rank joins its job.
  }
}

}  // namespace lockstep

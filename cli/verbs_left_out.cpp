// In place of the verbs with one thread, in the thread sanitizer's build (CMakeLists.txt).
#include <cli/dispatch.h>

#include <lockstep/base/error.h>

namespace lockstep::cli {

namespace {

[[noreturn]] int is_left_out(const char* verb) {
  throw UsageError("the thread sanitizer's build has no '{}'", verb);
}

}  // namespace

int train(Arguments) { is_left_out("train"); }
int ckpt(Arguments) { is_left_out("ckpt"); }
int plan(Arguments) { is_left_out("plan"); }

}  // namespace lockstep::cli

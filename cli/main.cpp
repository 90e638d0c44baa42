// The program `lockstep`. It links nothing of LibTorch, so that `lockstep run` starts at once.
#include <cli/dispatch.h>
#include <cli/verbs.h>

namespace lockstep::cli {

#define LOCKSTEP_DECLARE(name, summary) int name(Arguments arguments);
#define LOCKSTEP_IGNORE(name, summary)
LOCKSTEP_VERBS(LOCKSTEP_DECLARE, LOCKSTEP_IGNORE, LOCKSTEP_DECLARE)

namespace {

#define LOCKSTEP_HERE(name, summary) {#name, summary, &name},
#define LOCKSTEP_ELSEWHERE(name, summary) {#name, summary, nullptr},
constexpr Verb kVerbs[] = {LOCKSTEP_VERBS(LOCKSTEP_HERE, LOCKSTEP_ELSEWHERE, LOCKSTEP_HERE)};

}  // namespace

}  // namespace lockstep::cli

int main(int argc, char** argv) {
  return lockstep::cli::dispatch(lockstep::cli::kVerbs, argc, argv);
}

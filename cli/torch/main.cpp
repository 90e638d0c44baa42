// The program `lockstep-torch`: the verbs that need LibTorch. `lockstep` executes it, users do not.
#include <cli/dispatch.h>
#include <cli/verbs.h>

namespace lockstep::cli {

#define LOCKSTEP_DECLARE(name, summary) int name(Arguments arguments);
#define LOCKSTEP_IGNORE(name, summary)
LOCKSTEP_VERBS(LOCKSTEP_IGNORE, LOCKSTEP_DECLARE, LOCKSTEP_DECLARE)

namespace {

#define LOCKSTEP_HERE(name, summary) {#name, summary, &name},
constexpr Verb kVerbs[] = {LOCKSTEP_VERBS(LOCKSTEP_IGNORE, LOCKSTEP_HERE, LOCKSTEP_HERE)};

}  // namespace

}  // namespace lockstep::cli

int main(int argc, char** argv) {
  return lockstep::cli::dispatch(lockstep::cli::kVerbs, argc, argv);
}

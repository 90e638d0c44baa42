#include <lockstep/optim/lion/plain/options.h>

namespace lockstep::optim {

void LionOptions::describe(OptionKeys& keys) {
  keys.two_numbers({.name = "betas",
                    .meaning = "how much of the average of gradients counts in a step beside the "
                               "gradient, and how much of it each step keeps"},
                   betas, {.lowest = 0, .highest = 1, .below_highest = true});
}

}  // namespace lockstep::optim

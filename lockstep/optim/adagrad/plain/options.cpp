#include <lockstep/optim/adagrad/plain/options.h>

namespace lockstep::optim {

void AdagradOptions::describe(OptionKeys& keys) {
  keys.number({.name = "eps", .meaning = "added to the root of the sum of squares"}, eps,
              {.lowest = 0, .highest = 1, .above_lowest = true});
  keys.number({.name = "lr_decay",
               .meaning = "the learning rate of a parameter's step t is divided by 1 + (t - 1) "
                          "times this"},
              lr_decay, {.lowest = 0});
}

}  // namespace lockstep::optim

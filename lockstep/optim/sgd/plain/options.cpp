#include <lockstep/optim/sgd/plain/options.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

void SGDOptions::describe(OptionKeys& keys) {
  keys.number({.name = "momentum", .meaning = "how much of the step before each step keeps"},
              momentum, {.lowest = 0, .highest = 1, .below_highest = true});
  keys.number({.name = "dampening", .meaning = "how much less of the gradient the momentum takes"},
              dampening, {.lowest = 0, .highest = 1});
  keys.boolean({.name = "nesterov", .meaning = "whether the momentum looks ahead"}, nesterov);
}

std::vector<std::string> SGDOptions::state_names() const {
  if (momentum == 0) return {};
  return {"momentum_buffer"};
}

std::vector<OptionMistake> SGDOptions::mistakes(std::string_view /*type*/) const {
  if (!nesterov || (momentum > 0 && dampening == 0)) return {};
  return {{.key = "nesterov",
           .judged_with = {"momentum", "dampening"},
           .what = fmt::format("is true, but momentum is {} and dampening {}: it needs a momentum "
                               "above 0 and no dampening",
                               momentum, dampening)}};
}

}  // namespace lockstep::optim

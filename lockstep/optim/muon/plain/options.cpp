#include <lockstep/optim/muon/plain/options.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

void MuonOptions::describe(OptionKeys& keys) {
  constexpr NumberRange kRate{.lowest = 0, .highest = 1000, .above_lowest = true};
  keys.number({.name = "momentum", .meaning = "how much of a matrix's momentum each step keeps"},
              momentum, {.lowest = 0, .highest = 1, .below_highest = true});
  keys.boolean({.name = "nesterov",
                .meaning = "whether the momentum looks ahead, as DeepSpeed's always does",
                .deepspeed = ""},
               nesterov);
  keys.integer({.name = "ns_steps",
                .meaning = "steps of the Newton-Schulz iteration, which DeepSpeed fixes at 5",
                .deepspeed = ""},
               ns_steps, {.lowest = 1, .highest = 100});
  auto rate = static_cast<std::size_t>(adjust_lr_fn);
  keys.choice({.name = "adjust_lr_fn",
               .meaning = "torch.optim.Muon's: a matrix moves by the learning rate times √(rows / "
                          "columns), at least times 1 (`\"original\"`, as DeepSpeed), or times 0.2 "
                          "· √(the larger side) (`\"match_rms_adamw\"`)",
               .deepspeed = ""},
              rate, {"original", "match_rms_adamw"});
  adjust_lr_fn = static_cast<MuonRate>(rate);
  keys.number({.name = "muon_lr",
               .meaning = "learning rate of matrices; a schedule keeps its proportion to `lr`",
               .by_default = "`optimizer.params.lr`"},
              muon_lr, kRate);
  keys.number({.name = "adam_lr",
               .meaning = "learning rate of the other parameters, in the same way",
               .by_default = "`optimizer.params.lr`"},
              adam_lr, kRate);
  keys.two_numbers({.name = "betas",
                    .meaning = "how much of the two moments of other parameters each step keeps"},
                   betas, {.lowest = 0, .highest = 1, .below_highest = true});
  keys.number({.name = "eps", .meaning = "added to the root of their second moment"}, eps,
              {.lowest = 0, .highest = 1, .above_lowest = true});
}

std::vector<OptionMistake> MuonOptions::mistakes(std::string_view /*type*/) const {
  if (lr > 0) return {};
  const auto without_lr = [](std::string_view key, double rate) {
    return OptionMistake{.key = key,
                         .judged_with = {"lr"},
                         .what = fmt::format("is {}, but lr is not given: set lr to the learning "
                                             "rate of step() that this one belongs to",
                                             rate)};
  };
  std::vector<OptionMistake> found;
  if (muon_lr) found.push_back(without_lr("muon_lr", *muon_lr));
  if (adam_lr) found.push_back(without_lr("adam_lr", *adam_lr));
  return found;
}

}  // namespace lockstep::optim

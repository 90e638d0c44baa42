#include <lockstep/parallel/pipeline/schedule/action.h>

#include <array>
#include <charconv>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

constexpr std::array<std::string_view, kNumActionKinds> kLetters = {"F",  "B",  "I",  "W",
                                                                    "SA", "RA", "SG", "RG"};
// More digits need not fit into an int, and no schedule has so many of anything.
constexpr std::size_t kMostDigits = 9;

std::optional<int> parse_number(std::string_view digits) {
  if (digits.empty() || digits.size() > kMostDigits) return std::nullopt;
  // One spelling for each: a sign or a leading zero is none.
  if (digits.front() < '0' || digits.front() > '9') return std::nullopt;
  if (digits.front() == '0' && digits.size() > 1) return std::nullopt;
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

}  // namespace

Action other_end(const Action& transfer) {
  const int stage = transfer.stage;
  switch (transfer.kind) {
    case ActionKind::send_activation:
      return {ActionKind::receive_activation, stage + 1, transfer.micro_batch};
    case ActionKind::receive_activation:
      return {ActionKind::send_activation, stage - 1, transfer.micro_batch};
    case ActionKind::send_gradient:
      return {ActionKind::receive_gradient, stage - 1, transfer.micro_batch};
    case ActionKind::receive_gradient:
      return {ActionKind::send_gradient, stage + 1, transfer.micro_batch};
    default: break;
  }
  LOCKSTEP_CHECK(false, "{} is no transfer", to_text(transfer));
  return transfer;
}

std::string to_text(const Action& action) {
  return fmt::format("{}{}.{}", kLetters.at(static_cast<std::size_t>(action.kind)), action.stage,
                     action.micro_batch);
}

std::optional<Action> parse_action(std::string_view text) {
  const auto digits = text.find_first_of("0123456789");
  const auto dot = text.find('.');
  if (digits == std::string_view::npos || dot == std::string_view::npos || dot < digits)
    return std::nullopt;
  const auto stage = parse_number(text.substr(digits, dot - digits));
  const auto micro_batch = parse_number(text.substr(dot + 1));
  if (!stage || !micro_batch) return std::nullopt;
  for (std::size_t kind = 0; kind < kLetters.size(); ++kind) {
    if (kLetters[kind] == text.substr(0, digits))
      return Action{static_cast<ActionKind>(kind), *stage, *micro_batch};
  }
  return std::nullopt;
}

}  // namespace lockstep::pipeline

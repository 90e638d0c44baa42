// What a rank of a pipeline does, one thing at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::pipeline {

enum class ActionKind : std::uint8_t {
  forward,
  backward,            // the whole of it
  backward_input,      // the gradient of the stage's input, which the stage before waits for
  backward_weight,     // the gradients of its parameters, which nobody waits for
  send_activation,     // the stage's output, to the stage after it
  receive_activation,  // the stage's input, from the stage before it
  send_gradient,       // the gradient of the stage's input, to the stage before it
  receive_gradient,    // the gradient of the stage's output, from the stage after it
};
inline constexpr int kNumActionKinds = 8;

// Stages are numbered over the whole model and micro-batches over the step, both from 0. A
// transfer's stage is the one at this end of it.
struct Action {
  ActionKind kind = ActionKind::forward;
  int stage = 0;
  int micro_batch = 0;

  bool operator==(const Action&) const = default;
};

constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::send_activation || kind == ActionKind::send_gradient;
}
constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::receive_activation || kind == ActionKind::receive_gradient;
}
constexpr bool is_transfer(ActionKind kind) { return is_send(kind) || is_receive(kind); }

// What the rank at the other end of a transfer does: a send's receive, a receive's send. Its stage
// need not exist.
Action other_end(const Action& transfer);

// "F0.3" is the forward of micro-batch 3 through stage 0. B, I and W are the kinds of backward (I
// of the input, W of the weights), SA and RA send and receive activations, SG and RG gradients.
std::string to_text(const Action& action);

// Nothing where the text is not one that to_text() writes.
std::optional<Action> parse_action(std::string_view text);

}  // namespace lockstep::pipeline

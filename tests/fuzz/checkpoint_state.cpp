// state.json of a checkpoint.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/training_state.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  checkpoint::StateFile file;
  try {
    file = checkpoint::parse_state(text, "state 'fuzzed'");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("state 'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
    return;
  }
  require(file.state.step >= 0 && file.state.data.position >= 0, "what counts is not below 0");
  // As text, as a NaN does not equal itself.
  const std::string again = checkpoint::to_text(file);
  require(checkpoint::to_text(checkpoint::parse_state(again, "again")) == again,
          "what is read can be kept");
}

}  // namespace lockstep::fuzz

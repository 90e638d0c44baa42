// Token files with llm.c's header.
#include <cstring>
#include <string_view>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/data/tokens/token_format.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  try {
    const std::vector<data::TokenBytes> files = {{input, "fuzzed.bin"}};
    const data::TokenLayout layout = data::token_format("llm.c").layout(files);
    require(layout.lies_in(input.size()), "the tokens lie in the file");
    require(1024 + layout.size() * data::item_bytes(layout.type()) == std::ssize(input),
            "the sizes add up");
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(layout.size()));
    layout.copy(input, 0, tokens);
    const std::int64_t limit = tokens.back();
    const auto outside = layout.first_outside(input, limit);
    require(outside.has_value() && outside->token >= limit, "a token too large is found");
    require(tokens[static_cast<std::size_t>(outside->position)] == outside->token,
            "and where it stands");
    require(!layout.first_outside(input, data::max_token(layout.type()) + 1), "none is larger");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.find("fuzzed.bin") != what.npos, "a message names the file");
    require(what.size() < 1000, "a message is short");
  }
}

}  // namespace lockstep::fuzz

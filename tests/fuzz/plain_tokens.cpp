// Token files without a header: text, and nanoGPT's.
#include <string_view>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/data/tokens/token_format.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

void check(const data::TokenLayout& layout, std::span<const std::byte> file) {
  require(layout.size() * data::item_bytes(layout.type()) == std::ssize(file), "the sizes add up");
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(layout.size()));
  layout.copy(file, 0, tokens);
  for (const std::int64_t token : tokens)
    require(token >= 0 && token <= data::max_token(layout.type()), "a token is of its type");
  // Copies from the middle to the end, as a reader of sequences does.
  std::vector<std::int64_t> half(tokens.size() - tokens.size() / 2);
  layout.copy(file, std::ssize(tokens) / 2, half);
  require(half.empty() || half.back() == tokens.back(), "a range is that of the whole");
}

}  // namespace

void run(std::span<const std::byte> input) {
  for (const char* format : {"text", "nanogpt"}) {
    try {
      const std::vector<data::TokenBytes> files = {{input, "fuzzed.bin"}};
      check(data::token_format(format).layout(files), input);
    } catch (const UsageError& error) {
      const std::string_view what = error.what();
      require(what.find("fuzzed.bin") != what.npos, "a message names the file");
      require(what.size() < 1000, "a message is short");
    }
  }
}

}  // namespace lockstep::fuzz

// Megatron's .idx; the first two bytes of the input are the size of the .bin.
#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/data/tokens/token_format.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  std::uint16_t token_bytes = 0;
  if (input.size() < sizeof token_bytes) return;
  std::memcpy(&token_bytes, input.data(), sizeof token_bytes);
  try {
    // The buffer has exactly this size, so that the address sanitizer sees an access outside.
    const std::vector<std::byte> file(token_bytes, std::byte{0x81});
    const std::span<const std::byte> index = input.subspan(sizeof token_bytes);
    const data::TokenFormat& megatron = data::token_format("megatron");
    const std::vector<data::TokenBytes> files = {{file, "fuzzed.bin"}, {index, "fuzzed.idx"}};
    const data::TokenLayout layout = megatron.layout(files);
    require(layout.size() > 0, "there are tokens");
    require(layout.lies_in(file.size()), "they lie in the .bin");
    require(12 * layout.num_runs() <= index.size(), "runs are made of sequences");
    std::vector<std::int64_t> tokens(
        static_cast<std::size_t>(std::min<std::int64_t>(layout.size(), 100000)));
    layout.copy(file, layout.size() - std::ssize(tokens), tokens);
    require(std::count(tokens.begin(), tokens.end(), tokens.front()) == std::ssize(tokens),
            "all come from the file");
    const std::vector<std::int64_t> bounds = megatron.document_bounds(files);
    require(bounds.front() == 0 && bounds.back() == layout.size() &&
                std::is_sorted(bounds.begin(), bounds.end()),
            "documents lie one after the other");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.find("fuzzed.idx") != what.npos, "a message names the file");
    require(what.size() < 1000, "a message is short");
  }
}

}  // namespace lockstep::fuzz

// Indices of models in several files.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/folder.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    for (const auto& [tensor, file] : checkpoint::parse_index(text, "index 'fuzzed'")) {
      require(!file.empty() && file != "." && file != "..", "a file name is one");
      require(file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
              "a file name stays in its folder");
    }
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("index 'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
  }
}

}  // namespace lockstep::fuzz

// The hashes of an exported model.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/folder.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    const std::string read = checkpoint::FolderHashes::parse(text, "'fuzzed'").text();
    require(checkpoint::FolderHashes::parse(read, "'written'").text() == read,
            "what was read and written reads the same");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
  }
}

}  // namespace lockstep::fuzz

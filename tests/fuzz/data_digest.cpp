// data.json of a checkpoint.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/train/preflight/resume_check.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    const train::DataDigest digest = train::parse_digest(text, "fuzzed.json");
    require(train::parse_digest(train::to_text(digest), "again") == digest,
            "what is read can be kept");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.find("fuzzed.json") != what.npos, "a message names the file");
    require(what.size() < 1500, "a message is short");
  }
}

}  // namespace lockstep::fuzz

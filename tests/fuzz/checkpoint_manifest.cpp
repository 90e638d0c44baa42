// manifest.json of a checkpoint, sealed with the correct hash.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/manifest.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  checkpoint::Manifest manifest;
  try {
    manifest = checkpoint::parse_manifest(checkpoint::seal_manifest(text), "manifest 'fuzzed'");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("manifest 'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
    return;
  }
  require(manifest.state.step >= 0, "what counts is not below 0");
  for (const auto& [name, tensor] : manifest.tensors)
    for (const checkpoint::Piece& piece : tensor.pieces)
      require(manifest.files.contains(piece.file), "a piece is in one of the files");
  // Compares texts, because a NaN does not equal itself.
  const std::string again = to_text(manifest);
  require(to_text(checkpoint::parse_manifest(again, "again")) == again, "what is read can be kept");
}

}  // namespace lockstep::fuzz

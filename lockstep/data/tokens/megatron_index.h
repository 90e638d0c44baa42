// The .idx file beside Megatron's .bin: which bytes are which sequence, and where documents begin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include <lockstep/data/tokens/token_layout.h>

namespace lockstep::data {

// Checked against the sizes of both files before anything is believed. A view of the index's bytes,
// which must outlive it; all it holds besides is the layout. Thread-safe. UsageError names the
// file, the place, what is there and what to do.
class MegatronIndex {
 public:
  // `index` is the whole .idx file, `path` its name for messages, `token_bytes` the .bin's size.
  MegatronIndex(std::span<const std::byte> index, const std::filesystem::path& path,
                std::int64_t token_bytes);

  // The tokens of all sequences, in the index's order.
  const TokenLayout& layout() const { return layout_; }
  std::int64_t num_sequences() const { return num_sequences_; }

  // The position of each document's first token, and at the end the number of tokens. Sequences
  // after the last bound in the file are one more document. Read from the file at each call.
  std::vector<std::int64_t> document_bounds() const;

 private:
  std::int32_t length(std::int64_t sequence) const;
  std::int64_t pointer(std::int64_t sequence) const;
  std::int64_t document(std::int64_t number) const;

  void check_sizes(const std::string& name) const;
  void read_sequences(const std::string& name, std::int64_t token_bytes);
  void check_documents(const std::string& name) const;

  std::span<const std::byte> bytes_;
  std::int64_t num_sequences_ = 0;
  std::int64_t num_documents_ = 0;  // as the file counts: one more than there are
  TokenLayout layout_;
};

}  // namespace lockstep::data

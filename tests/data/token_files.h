// Token files as other programs write them, made byte by byte.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <lockstep/data/tokens/sequences.h>

namespace lockstep::data {

template <typename T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// llm.c's file: 256 words, then the tokens.
inline std::string llm_c_header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return bytes_of(header);
}

// Megatron's .idx file.
struct IndexFile {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  std::uint64_t version = 1;
  std::uint8_t type = 8;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> pointers;
  std::vector<std::int64_t> documents = {0};
  std::string modes;

  // One sequence after the other, as Megatron's builder writes them; each is a document.
  static IndexFile contiguous(std::uint8_t type, int item_bytes,
                              const std::vector<std::int32_t>& lengths) {
    IndexFile index;
    index.type = type;
    index.lengths = lengths;
    std::int64_t pointer = 0;
    for (const std::int32_t length : lengths) {
      index.pointers.push_back(pointer);
      index.documents.push_back(static_cast<std::int64_t>(index.pointers.size()));
      pointer += std::int64_t{length} * item_bytes;
    }
    return index;
  }

  std::string bytes() const {
    return magic + bytes_of(version) + bytes_of(type) +
           bytes_of(static_cast<std::uint64_t>(lengths.size())) +
           bytes_of(static_cast<std::uint64_t>(documents.size())) + bytes_of(lengths) +
           bytes_of(pointers) + bytes_of(documents) + modes;
  }
};

template <typename Tokens>
std::vector<std::int64_t> copied(const Tokens& tokens, std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> copy(static_cast<std::size_t>(count), -1);
  tokens.copy(first, copy);
  return copy;
}

template <typename Tokens>
std::vector<std::int64_t> all_of(const Tokens& tokens) {
  return copied(tokens, 0, tokens.size());
}

inline std::vector<std::int64_t> count_up(std::int64_t count, std::int64_t from = 0) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), from);
  return numbers;
}

}  // namespace lockstep::data

// The formats of token files. They are rows of one table, to which a program may add its own;
// nothing else compares names of formats.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/data/tokens/token_layout.h>

namespace lockstep::data {

// A file's contents, and its path for messages.
struct TokenBytes {
  std::span<const std::byte> bytes;
  std::filesystem::path path;
};

// A format: how its files are found and recognised, and where their tokens lie. The functions hold
// no state and may be called from any thread.
struct TokenFormat {
  // The name in configs and messages: "llm.c".
  std::string name;
  // Shown in parentheses after the name: ".bin, no header". May be empty.
  std::string note = {};

  // The files that `path` stands for, whether they exist or not. The first one holds the tokens.
  // Null for formats of one file, which is `path` itself.
  std::vector<std::filesystem::path> (*files)(const std::filesystem::path& path) = nullptr;

  // Whether "auto" takes `path` for this format. Must not throw: false where the file is missing or
  // cannot be read.
  bool (*recognises)(const std::filesystem::path& path) = nullptr;

  // Where the tokens lie in the first file. Throws a UsageError, which names the file, the place,
  // what was found and what to do, where the files are not of this format.
  TokenLayout (*layout)(std::span<const TokenBytes> files) = nullptr;

  // The position of each document's first token, and at the end the number of tokens. Null for
  // formats that do not store this: a file is one document then.
  std::vector<std::int64_t> (*document_bounds)(std::span<const TokenBytes> files) = nullptr;
};

// The word that leaves the choice to the table: the last row that recognises a file reads it.
inline constexpr std::string_view kAutomaticFormat = "auto";

// All rows in order: first the formats of this library, from the least to the most specific, then
// those that were added. The pointers stay valid. Thread-safe.
std::vector<const TokenFormat*> token_formats();

// Adds a row. Call this before a config is read or a file is opened. Throws a UsageError where the
// name is empty, taken or "auto", or where `recognises` or `layout` is missing. Thread-safe.
void add_token_format(TokenFormat format);

// The format of this name. Throws a UsageError that lists all names where there is none.
const TokenFormat& token_format(std::string_view name);

// The format to read `path` with: the named one, or with "auto" the last that recognises it.
const TokenFormat& token_format_of(const std::filesystem::path& path, std::string_view name);

// The files that `path` stands for in a format; the one with the tokens comes first.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& path,
                                            const TokenFormat& format);

// "text, nanogpt (.bin, no header), …": every name with its note.
std::string list_token_formats();

// For layout(): throws a UsageError where the file is empty.
void check_not_empty(const TokenBytes& file);

}  // namespace lockstep::data

// A JSON document that remembers where each value stands, so that a mistake found much later can
// still name its line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep::train {

struct JsonNode;
struct JsonMember;

struct JsonNull {};
using JsonList = std::vector<JsonNode>;
// Members in the file's order. A key that was given twice is here twice; find() takes the first.
using JsonObject = std::vector<JsonMember>;

struct JsonNode {
  std::variant<JsonNull, bool, std::int64_t, double, std::string, JsonList, JsonObject> value;
  int line = 0;      // of its key, from 1; 0 for the whole document and for what is not from a file
  std::string flag;  // "--set a.b=1" where it is from the command line

  const JsonObject* object() const { return std::get_if<JsonObject>(&value); }
  const JsonList* list() const { return std::get_if<JsonList>(&value); }
  const std::string* text() const { return std::get_if<std::string>(&value); }

  // The value of a key; null where this is no object or has no such key.
  const JsonNode* find(std::string_view key) const;
  // The deepest value that exists along a path such as "a.b[2].c".
  const JsonNode& nearest(std::string_view path) const;
  // Null, and the word "auto", ask for the default.
  bool is_default() const;
  // Also what switches nothing on: false, and 0.
  bool asks_for_nothing() const;
  // As JSON, whole.
  std::string text_of_value() const;
  // As JSON, shortened to fit in a sentence.
  std::string quoted() const;
};

// Not a std::pair: some compilers cannot have one of a type that holds it.
struct JsonMember {
  JsonMember(std::string name, JsonNode value) : key(std::move(name)), node(std::move(value)) {}

  std::string key;
  JsonNode node;
};

// Makes a user's text fit for a message: at most so many characters, and a question mark for each
// that a terminal might not show as it is.
std::string shorten_quote(std::string_view text, std::size_t longest = 60);

// Reads a JSON object in UTF-8; // and /* */ comments are allowed. UsageError with file, line and
// column for anything else, and for a document beyond any config's size or depth.
JsonNode parse_json(std::string_view text, const std::string& file);

// Sets one value of a document by its path, as the flag --set does: "optimizer.params.lr=3e-4".
// A value that is no JSON is taken as a text. Makes missing sections on the way. UsageError naming
// the flag.
void apply_override(JsonNode& root, const std::string& assignment);

}  // namespace lockstep::train

// Reads a JSON document strictly. The caller asks for every value by its key, with its type and
// range. Mistakes are collected, so that one run names all of them; a key that nobody asked for is
// a mistake, too.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/train/config/json_tree.h>

namespace lockstep::train {

class JsonSection;

// Whether a key is a comment, as some people put them into JSON. A key that a flag sets is none.
bool is_comment(const std::string& key, const JsonNode& node);

// "a.b"
std::string join_path(std::string_view path, std::string_view key);

// One document being read. Ownership: holds the tree; stays where it is, for its sections point to
// it. Threading: one thread. Failure: nothing throws but finish().
class JsonReader {
 public:
  // `file` is its name in messages; empty for a config that is of no file.
  JsonReader(JsonNode root, std::string file) : root_(std::move(root)), file_(std::move(file)) {}
  JsonReader(const JsonReader&) = delete;
  JsonReader& operator=(const JsonReader&) = delete;

  JsonSection top();
  const JsonNode& root() const { return root_; }

  // "<path> <what>", with the place of the value, or of the nearest section around it.
  void mistake(const std::string& path, const std::string& what);
  // The same with a sentence of its own.
  void mistake_about(const std::string& path, const std::string& sentence);
  // A mistake in a --set that could not be applied, as apply_override() says it.
  void mistake_of_flag(const std::string& assignment, const std::string& sentence);
  // The same for a value that is right by itself: keys that depend on it can still be checked.
  void misfit(std::string_view path, const std::string& sentence);

  // Keeps as mistakes only unknown keys and keys that are given twice, and starts over. The next
  // reading of the document then knows the misspelt keys when it asks for the intended ones.
  void start_over();

  // Whether something at this path, or in it, has been found wrong, or is meant by a key that is.
  bool has_mistake(std::string_view path) const;
  bool has_mistakes() const { return !mistakes_.empty(); }
  // Paths that a section has said so of, in the order in which it has.
  const std::vector<std::string>& without_effect() const { return without_effect_; }

  // A UsageError with all mistakes, where there are any.
  void finish();

 private:
  friend class JsonSection;

  // The keys that are known in one section.
  struct Known {
    std::vector<std::string> keys;
    std::vector<std::string> foreign;  // dealt with, but never proposed
    bool anything = false;             // its keys are not to be judged
    std::string title;                 // what it is called in messages; its path where empty
  };

  struct Mistake {
    std::string path;
    std::string text;
    int line = 0;  // 0 for the document as a whole
    std::string flag;
    std::string meant;  // the path of a key that this one is a slip of
  };

  void find_unknown(const JsonNode& node, const std::string& path);
  void find_repeated(const JsonNode& node, const std::string& path);
  void unknown(const JsonNode& node, const std::string& path, const std::string& key);
  // The key that an unknown key of a section may have been meant as.
  struct Suggestion {
    std::string text;   // the end of a sentence
    std::string meant;  // the path of the key; empty where none is near
  };
  Suggestion suggestion(const std::string& path, const std::string& key) const;

  JsonNode root_;
  std::string file_;
  std::map<std::string, Known, std::less<>> known_;
  std::vector<Mistake> mistakes_;
  std::vector<std::string> without_effect_;
};

template <typename Enum>
struct Named {
  std::string_view name;
  Enum value;
};

template <typename Enum, std::size_t N>
std::string_view name_of(Enum value, const Named<Enum> (&all)[N]) {
  for (const Named<Enum>& one : all)
    if (one.value == value) return one.name;
  return "";
}

// An object of the document, or a missing one, which has defaults only. A reading function leaves
// `value` as it is where the key is missing, null, "auto" or wrong, and returns whether it was set.
class JsonSection {
 public:
  // Whether the file has this section, and it is an object.
  bool present() const { return node_ != nullptr; }
  const std::string& path() const { return path_; }
  std::string path(std::string_view key) const;

  // Null where the key is missing or asks for the default. Any of these makes the key a known one.
  const JsonNode* find(std::string_view key);

  bool integer(std::string_view key, std::int64_t& value, std::int64_t lowest,
               std::int64_t highest);
  bool integer(std::string_view key, std::optional<std::int64_t>& value, std::int64_t lowest,
               std::int64_t highest);
  // A list of at least one.
  bool integers(std::string_view key, std::vector<std::int64_t>& values, std::int64_t lowest,
                std::int64_t highest);
  struct Range {
    double lowest;
    double highest;
    bool above_lowest = false;   // lowest itself is outside
    bool below_highest = false;  // highest itself is outside
  };
  bool number(std::string_view key, double& value, Range range);
  bool boolean(std::string_view key, bool& value);
  bool text(std::string_view key, std::string& value);
  // One text or a list of at least one.
  bool texts(std::string_view key, std::vector<std::string>& values);

  // Capitals do not matter.
  template <typename Enum, std::size_t N>
  bool choice(std::string_view key, Enum& value, const Named<Enum> (&all)[N]) {
    std::vector<std::string_view> names;
    for (const Named<Enum>& one : all) names.push_back(one.name);
    const auto found = choice_index(key, names);
    if (found) value = all[*found].value;
    return found.has_value();
  }

  // Two numbers in a list.
  bool numbers(std::string_view key, std::array<double, 2>& values, Range range);
  // Which of the names the key is set to; nothing where it is missing or none of them.
  std::optional<std::size_t> choice_index(std::string_view key,
                                          const std::vector<std::string_view>& names);

  // A section whose keys are free, in the document's order: which of the names each of them has.
  bool choices(std::string_view key, std::vector<std::pair<std::string, std::size_t>>& chosen,
               const std::vector<std::string_view>& names);

  // A section whose keys are free, as JSON.
  bool object(std::string_view key, std::string& json);

  JsonSection section(std::string_view key);

  // The other keys that the document sets here, comments left out. They become known.
  std::vector<std::string> keys_beside(std::string_view key);

  // A key of another system's that the caller deals with: not one to propose for a mistyped key.
  const JsonNode* foreign(std::string_view key);

  // Keys that are known without being read.
  void allow(std::span<const std::string_view> keys);
  void allow_anything();
  // Sets the name that messages give to the section.
  void call(std::string_view title);

  bool has_mistake() const { return reader_->has_mistake(path_); }
  bool has_mistake(std::string_view key) const { return reader_->has_mistake(path(key)); }
  // Whether nothing is wrong with any of these, so that they can be judged together.
  bool sound(std::span<const std::string_view> keys) const;
  bool sound(std::initializer_list<std::string_view> keys) const {
    return sound(std::span(keys.begin(), keys.size()));
  }
  void mistake(std::string_view key, const std::string& what);
  void has_no_effect(std::string_view key);
  void missing(std::string_view key, const std::string& what_it_is);

 private:
  friend class JsonReader;
  JsonSection(JsonReader& reader, const JsonNode* node, std::string path);

  JsonReader::Known& known() { return reader_->known_[path_]; }

  JsonReader* reader_;
  const JsonNode* node_;
  std::string path_;
};

}  // namespace lockstep::train

#include <lockstep/train/config/json_tree.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <limits>
#include <optional>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

using nlohmann::json;

constexpr std::size_t kMostBytes = 1 << 20;
constexpr std::size_t kMostValues = 10'000;
constexpr std::size_t kDeepest = 16;

// Walks the text for the parser and counts the lines it has read.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, int* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    if (*at_ == '\n') ++*line_;
    ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  int* line_;
};

// Builds the tree from the parser's events. When a key is reported the parser has read no further
// than its closing quote, so the line is the key's.
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  int* line() { return &line_; }
  JsonNode take() { return std::move(root_); }

  bool null() override { return add(JsonNull{}); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return add(static_cast<double>(value));
    return add(static_cast<std::int64_t>(value));
  }
  bool number_float(double value, const std::string& /*text*/) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(json::binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*size*/) override { return open(JsonObject{}); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(JsonList{}); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    key_ = std::move(name);
    key_line_ = line_;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& problem) override {
    // The parser's words without its number and its own way of giving the place.
    std::string what = problem.what();
    for (const char* end : {"] ", "column "})
      if (const auto at = what.find(end); at != std::string::npos)
        what = what.substr(at + std::string_view(end).size());
    if (!what.empty() && std::isdigit(static_cast<unsigned char>(what.front())) != 0)
      if (const auto colon = what.find(": "); colon != std::string::npos)
        what = what.substr(colon + 2);
    what = shorten_quote(what, 200);
    const std::size_t at = std::min(position == 0 ? 0 : position - 1, text_.size());
    const std::string_view before = text_.substr(0, at);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const auto line_start = before.rfind('\n');
    const std::size_t column = at - (line_start == std::string_view::npos ? 0 : line_start + 1) + 1;
    throw UsageError("{}:{}:{}: not valid JSON: {}{}", file_, line, column, what, hint(what, at));
  }

 private:
  // A hint at the mistake that people most often make here.
  std::string hint(std::string_view what, std::size_t at) const {
    if (what.find("ill-formed UTF-8") != std::string_view::npos)
      return fmt::format(" (a config is UTF-8: save it as that, or convert it, for example from "
                         "Latin-1: iconv -f ISO-8859-1 -t UTF-8 {} > utf8.json)",
                         file_);
    if (what.find("unexpected end of input") != std::string_view::npos)
      return " (the file ends too early: is a closing '}' missing?)";
    if (at >= text_.size()) return "";
    const auto last = text_.substr(0, at).find_last_not_of(" \t\r\n");
    const char before = last == std::string_view::npos ? '\0' : text_[last];
    if ((text_[at] == '}' || text_[at] == ']') && before == ',')
      return " (remove the comma before it)";
    if (text_[at] == '\'') return " (texts stand in double quotes)";
    if (what.ends_with("expected '}'") || what.ends_with("expected ']'"))
      return " (is a comma missing before it?)";
    return "";
  }

  void count() const {
    if (num_values_ > kMostValues)
      throw UsageError("{}:{}: more than {} values: this is no config of Lockstep's", file_, line_,
                       kMostValues);
  }

  JsonNode* place(JsonNode node) {
    ++num_values_;
    count();
    if (open_.empty()) {
      root_ = std::move(node);
      return &root_;
    }
    JsonNode& parent = *open_.back();
    if (auto* object = std::get_if<JsonObject>(&parent.value)) {
      node.line = key_line_;
      return &object->emplace_back(std::move(key_), std::move(node)).node;
    }
    // The parser may have read past a number in a list, on to the next line.
    node.line = parent.line;
    return &std::get<JsonList>(parent.value).emplace_back(std::move(node));
  }

  template <typename Value>
  bool add(Value value) {
    if (open_.empty()) throw UsageError("{}: a config is a JSON object, {{...}}", file_);
    place(JsonNode{.value = std::move(value)});
    return true;
  }

  // The open nodes do not move: a parent gets no other child before the open one is closed.
  bool open(auto container) {
    if (open_.empty() && std::is_same_v<decltype(container), JsonList>) return add(0.0);
    if (open_.size() >= kDeepest)
      throw UsageError("{}:{}: nested deeper than the {} levels a config may have", file_, line_,
                       kDeepest);
    open_.push_back(place(JsonNode{.value = std::move(container)}));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& file_;
  JsonNode root_;
  std::vector<JsonNode*> open_;
  std::string key_;
  int key_line_ = 1;
  int line_ = 1;
  std::size_t num_values_ = 0;
};

// The encoding that a document's first bytes show, as iconv calls it, where it is not UTF-8.
std::string_view foreign_encoding(std::string_view text) {
  using namespace std::string_view_literals;
  constexpr std::pair<std::string_view, std::string_view> kMarks[] = {
      {"\xff\xfe\0\0"sv, "UTF-32"}, {"\0\0\xfe\xff"sv, "UTF-32"}, {"\xff\xfe"sv, "UTF-16"},
      {"\xfe\xff"sv, "UTF-16"},     {"\0\0\0"sv, "UTF-32BE"},     {"\0"sv, "UTF-16BE"}};
  for (const auto& [mark, encoding] : kMarks)
    if (text.starts_with(mark)) return encoding;
  // Without a mark: the first character of a JSON document is ASCII.
  if (text.size() < 2 || text[1] != '\0') return "";
  return text.substr(1, 3) == "\0\0\0"sv ? "UTF-32LE" : "UTF-16LE";
}

// How many bytes the first character of a text has; 0 where it is no UTF-8, or a character that
// moves the cursor, ends the line or changes the direction of writing.
std::size_t shown_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= ' ' && first <= '~' ? 1 : 0;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  std::uint32_t character = first & (0xffU >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
    character = (character << 6U) | (byte(i) & 0x3fU);
  }
  const auto in = [&](std::uint32_t lowest, std::uint32_t highest) {
    return character >= lowest && character <= highest;
  };
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_none = character < kLeast[length] || character > 0x10ffff || in(0xd800, 0xdfff);
  const bool is_control = in(0x80, 0x9f) || in(0x200b, 0x200f) || in(0x2028, 0x202e) ||
                          in(0x2060, 0x206f) || in(0xfff0, 0xfffb) || character == 0xfeff;
  return is_none || is_control ? 0 : length;
}

// Objects are converted whole, or shortened to "{...}" in messages.
enum class Objects { whole, shortened };

json to_library(const JsonNode& node, Objects objects) {
  return std::visit(
      [&](const auto& value) -> json {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, JsonNull>) {
          return nullptr;
        } else if constexpr (std::is_same_v<Value, JsonList>) {
          json list = json::array();
          for (const JsonNode& item : value) list.push_back(to_library(item, objects));
          return list;
        } else if constexpr (std::is_same_v<Value, JsonObject>) {
          if (objects == Objects::shortened) return "{...}";
          json object = json::object();
          for (const auto& [key, item] : value) object[key] = to_library(item, objects);
          return object;
        } else {
          return value;
        }
      },
      node.value);
}

}  // namespace

std::string shorten_quote(std::string_view text, std::size_t longest) {
  std::vector<std::string_view> characters;
  while (!text.empty() && characters.size() <= longest) {
    const std::size_t bytes = shown_bytes(text);
    characters.push_back(bytes == 0 ? "?" : text.substr(0, bytes));
    text = text.substr(std::max<std::size_t>(bytes, 1));
  }
  const bool cut = characters.size() > longest;
  if (cut) characters.resize(longest - 3);
  return fmt::format("{}{}", fmt::join(characters, ""), cut ? "..." : "");
}

const JsonNode* JsonNode::find(std::string_view key) const {
  if (const JsonObject* members = object())
    for (const auto& [name, node] : *members)
      if (name == key) return &node;
  return nullptr;
}

const JsonNode& JsonNode::nearest(std::string_view path) const {
  const JsonNode* node = this;
  while (!path.empty()) {
    const auto end = std::min(path.find_first_of(".["), path.size());
    const JsonNode* next = node->find(path.substr(0, end));
    if (next == nullptr) break;
    node = next;
    path = path.substr(end);
    if (path.starts_with('.')) path = path.substr(1);
    if (path.starts_with('[')) break;  // a list's items stand where their list does
  }
  return *node;
}

bool JsonNode::is_default() const {
  return std::holds_alternative<JsonNull>(value) || (text() != nullptr && *text() == "auto");
}

bool JsonNode::asks_for_nothing() const {
  if (is_default()) return true;
  if (const bool* flag = std::get_if<bool>(&value)) return !*flag;
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return *integer == 0;
  if (const auto* real = std::get_if<double>(&value)) return *real == 0;
  return false;
}

std::string JsonNode::text_of_value() const {
  return to_library(*this, Objects::whole).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string JsonNode::quoted() const {
  return shorten_quote(object() != nullptr
                           ? "{...}"
                           : to_library(*this, Objects::shortened)
                                 .dump(-1, ' ', false, json::error_handler_t::replace));
}

JsonNode parse_json(std::string_view text, const std::string& file) {
  if (text.size() > kMostBytes)
    throw UsageError("{} has {} bytes; a config has at most {}: is it the right file?", file,
                     text.size(), kMostBytes);
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
    throw UsageError("{} is empty: a config is a JSON object, as docs/config.md describes", file);
  if (const std::string_view encoding = foreign_encoding(text); !encoding.empty())
    throw UsageError("{} is {} text, and a config is UTF-8: save it as UTF-8, or convert it: iconv "
                     "-f {} -t UTF-8 {} > utf8.json",
                     file, encoding.substr(0, 6), encoding, file);
  Builder builder(text, file);
  json::sax_parse(CountingIterator(text.data(), builder.line()),
                  CountingIterator(text.data() + text.size(), builder.line()), &builder,
                  json::input_format_t::json, /*strict=*/true, /*ignore_comments=*/true);
  return builder.take();
}

namespace {

void mark(JsonNode& node, const std::string& flag) {
  node.line = 0;
  node.flag = flag;
  if (auto* list = std::get_if<JsonList>(&node.value))
    for (JsonNode& item : *list) mark(item, flag);
  if (auto* object = std::get_if<JsonObject>(&node.value))
    for (auto& [key, item] : *object) mark(item, flag);
}

JsonNode override_value(const std::string& text, const std::string& flag) {
  // Only objects are documents of ours: one with this value as its only one.
  try {
    const std::string document = "{\"value\":" + text + "\n}";
    JsonNode parsed = parse_json(document, flag);
    auto& object = std::get<JsonObject>(parsed.value);
    if (object.size() == 1) return std::move(object.front().node);
  } catch (const UsageError&) {
    // A list or an object with a mistake in it is not meant as a text; a shell that took the quotes
    // away makes such.
    if (text.starts_with('[') || text.starts_with('{') || text.starts_with('"'))
      throw UsageError("{}: the value is not valid JSON; in a shell, put it in single quotes, for "
                       "example --set 'data.train=[\"a.txt\", \"b.txt\"]'",
                       flag);
  }
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw UsageError("{}: the value is no UTF-8 text", flag);
  }
  return JsonNode{.value = text};
}

}  // namespace

void apply_override(JsonNode& root, const std::string& assignment) {
  const std::string flag = "--set " + shorten_quote(assignment);
  const auto equals = assignment.find('=');
  if (equals == std::string::npos)
    throw UsageError("{}: it must be <key>=<value>, for example --set optimizer.params.lr=3e-4",
                     flag);
  std::string_view path = std::string_view(assignment).substr(0, equals);
  JsonNode value = override_value(assignment.substr(equals + 1), flag);
  mark(value, flag);
  JsonNode* node = &root;
  for (bool last = false; !last;) {
    const auto dot = path.find('.');
    last = dot == std::string_view::npos;
    const std::string key(path.substr(0, dot));
    if (!last) path = path.substr(dot + 1);
    if (key.empty())
      throw UsageError("{}: the part before '=' must be a key, with a dot between a section and "
                       "what is in it, for example --set optimizer.params.lr=3e-4",
                       flag);
    if (node->is_default()) node->value = JsonObject{};
    auto* object = std::get_if<JsonObject>(&node->value);
    if (object == nullptr)
      throw UsageError("{}: '{}' cannot be set, because the config has {} where its section would "
                       "be",
                       flag, shorten_quote(key), node->quoted());
    auto found = std::find_if(object->begin(), object->end(),
                              [&](const auto& member) { return member.key == key; });
    if (found == object->end()) {
      object->emplace_back(key, JsonNode{.value = JsonObject{}, .line = 0, .flag = flag});
      found = std::prev(object->end());
    }
    node = &found->node;
  }
  *node = std::move(value);
}

}  // namespace lockstep::train

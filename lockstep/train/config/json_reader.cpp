#include <lockstep/train/config/json_reader.h>

#include <algorithm>
#include <cmath>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>

namespace lockstep::train {

namespace {

constexpr std::size_t kMostMistakes = 20;

std::string readable(std::string_view path) { return shorten_quote(path, 100); }

bool has(const std::vector<std::string>& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool within(std::string_view path, std::string_view outer) {
  return path.starts_with(outer) && (outer.empty() || path.size() == outer.size() ||
                                     path[outer.size()] == '.' || path[outer.size()] == '[');
}

}  // namespace

std::string join_path(std::string_view path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

bool is_comment(const std::string& key, const JsonNode& node) {
  return node.flag.empty() && (key.starts_with('_') || key.starts_with("//"));
}

JsonSection JsonReader::top() { return JsonSection(*this, &root_, ""); }

void JsonReader::mistake(const std::string& path, const std::string& what) {
  mistake_about(path, fmt::format("{} {}", readable(path), what));
}

void JsonReader::mistake_about(const std::string& path, const std::string& sentence) {
  const JsonNode& node = root_.nearest(path);
  mistakes_.push_back({.path = path, .text = sentence, .line = node.line, .flag = node.flag});
}

void JsonReader::mistake_of_flag(const std::string& assignment, const std::string& sentence) {
  const std::string flag = "--set " + shorten_quote(assignment);
  mistakes_.push_back({.path = assignment.substr(0, assignment.find('=')),
                       .text = sentence.substr(flag.size() + 2),
                       .flag = flag});
}

void JsonReader::misfit(std::string_view path, const std::string& sentence) {
  const JsonNode& node = root_.nearest(path);
  mistakes_.push_back({.path = "", .text = sentence, .line = node.line, .flag = node.flag});
}

bool JsonReader::has_mistake(std::string_view path) const {
  return std::any_of(mistakes_.begin(), mistakes_.end(), [&](const Mistake& mistake) {
    return within(mistake.path, path) || (!mistake.path.empty() && within(path, mistake.path)) ||
           (!mistake.meant.empty() && within(mistake.meant, path));
  });
}

// The same key in another section is a likelier guess than a similar key here.
JsonReader::Suggestion JsonReader::suggestion(const std::string& path,
                                              const std::string& key) const {
  std::vector<std::string> elsewhere;
  for (const auto& [section, known] : known_)
    if (has(known.keys, key)) elsewhere.push_back(join_path(section, key));
  if (elsewhere.size() == 1)
    return {fmt::format(": did you mean '{}'?", elsewhere.front()), elsewhere.front()};
  const auto found = known_.find(path);
  if (found == known_.end()) return {};
  const std::vector<std::string_view> names(found->second.keys.begin(), found->second.keys.end());
  if (const std::string text = did_you_mean(key, names); !text.empty())
    return {text, join_path(path, nearest_word(key, names))};
  if (path.empty()) return {": docs/config.md lists them all", ""};
  return {names.empty() ? "" : fmt::format(": its keys are {}", fmt::join(names, ", ")), ""};
}

void JsonReader::unknown(const JsonNode& node, const std::string& path, const std::string& key) {
  const std::string here = join_path(path, key);
  const std::string& called = known_[path].title;
  const std::string title = !called.empty() ? called : path.empty() ? "a config" : path;
  const auto [text, meant] = suggestion(path, readable(key));
  mistakes_.push_back({.path = here,
                       .text = fmt::format("{} is no key of {}{}", readable(here), title, text),
                       .line = node.line,
                       .flag = node.flag,
                       .meant = meant});
}

void JsonReader::find_unknown(const JsonNode& node, const std::string& path) {
  const auto known = known_.find(path);
  if (node.object() == nullptr || known == known_.end() || known->second.anything) return;
  for (const auto& [key, child] : *node.object()) {
    if (has(known->second.keys, key))
      find_unknown(child, join_path(path, key));
    else if (!has(known->second.foreign, key) && !is_comment(key, child))
      unknown(child, path, key);
  }
}

void JsonReader::find_repeated(const JsonNode& node, const std::string& path) {
  if (node.object() == nullptr) return;
  for (const auto& [key, child] : *node.object()) {
    const JsonNode* first = node.find(key);
    const std::string here = join_path(path, key);
    if (first != &child && !is_comment(key, child))
      mistakes_.push_back({.path = here,
                           .text = fmt::format("{} is given twice, first in line {}: remove one of "
                                               "them",
                                               readable(here), first->line),
                           .line = child.line,
                           .flag = child.flag});
    find_repeated(child, here);
  }
}

void JsonReader::start_over() {
  mistakes_.clear();
  find_unknown(root_, "");
  find_repeated(root_, "");
}

void JsonReader::finish() {
  if (mistakes_.empty()) return;
  // Mistakes of the whole come first, then the others in the file's order, then those of the
  // command line.
  std::stable_sort(mistakes_.begin(), mistakes_.end(), [](const Mistake& a, const Mistake& b) {
    return std::pair(!a.flag.empty(), a.line) < std::pair(!b.flag.empty(), b.line);
  });
  if (mistakes_.size() == 1) {
    const Mistake& only = mistakes_.front();
    const std::string line = only.line == 0 ? "" : fmt::format(":{}", only.line);
    const std::string place = only.flag.empty() ? file_ + line : only.flag;
    throw UsageError("{}{}{}", place, place.empty() ? "" : ": ", only.text);
  }
  std::string text =
      fmt::format("{} has {} mistakes:", file_.empty() ? "the config" : file_, mistakes_.size());
  for (std::size_t i = 0; i < std::min(mistakes_.size(), kMostMistakes); ++i) {
    const Mistake& one = mistakes_[i];
    text += "\n  ";
    if (!one.flag.empty())
      text += one.flag + ": ";
    else if (one.line != 0)
      text += fmt::format("line {}: ", one.line);
    text += one.text;
  }
  if (mistakes_.size() > kMostMistakes)
    text += fmt::format("\n  and {} more", mistakes_.size() - kMostMistakes);
  throw UsageError(text);
}

namespace {

constexpr std::size_t kMostItems = 1000;
// Beyond it a double does not hold every whole number.
constexpr double kLargestExact = 9007199254740992.0;

// "'a', 'b' or 'c'"
std::string alternatives(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", names[i]);
  return text;
}

// Also 1e6 and 5e8, as people write large whole numbers.
std::optional<std::int64_t> whole(const JsonNode& node) {
  if (const auto* integer = std::get_if<std::int64_t>(&node.value)) return *integer;
  const auto* real = std::get_if<double>(&node.value);
  if (real == nullptr || std::floor(*real) != *real || std::abs(*real) > kLargestExact)
    return std::nullopt;
  return static_cast<std::int64_t>(*real);
}

bool same_letters(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](char x, char y) { return lower(x) == lower(y); });
}

std::string range_text(std::int64_t lowest, std::int64_t highest) {
  return fmt::format("it must be a whole number from {} to {}", lowest, highest);
}

std::string range_words(const JsonSection::Range& range) {
  if (std::isinf(range.highest))
    return fmt::format("{} {}", range.above_lowest ? "above" : "at least", range.lowest);
  if (range.above_lowest || range.below_highest)
    return fmt::format("{} {} and {} {}", range.above_lowest ? "above" : "at least", range.lowest,
                       range.below_highest ? "below" : "at most", range.highest);
  return fmt::format("from {} to {}", range.lowest, range.highest);
}

std::optional<double> number_of(const JsonNode& node) {
  if (const auto* real = std::get_if<double>(&node.value)) return *real;
  if (const auto* integer = std::get_if<std::int64_t>(&node.value))
    return static_cast<double>(*integer);
  return std::nullopt;
}

bool is_inside(double number, const JsonSection::Range& range) {
  return std::isfinite(number) &&
         (range.above_lowest ? number > range.lowest : number >= range.lowest) &&
         (range.below_highest ? number < range.highest : number <= range.highest);
}

}  // namespace

JsonSection::JsonSection(JsonReader& reader, const JsonNode* node, std::string path)
    : reader_(&reader), node_(node), path_(std::move(path)) {
  known();
}

std::string JsonSection::path(std::string_view key) const { return join_path(path_, key); }

const JsonNode* JsonSection::find(std::string_view key) {
  auto& keys = known().keys;
  if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.emplace_back(key);
  const JsonNode* node = node_ == nullptr ? nullptr : node_->find(key);
  return node == nullptr || node->is_default() ? nullptr : node;
}

const JsonNode* JsonSection::foreign(std::string_view key) {
  known().foreign.emplace_back(key);
  return node_ == nullptr ? nullptr : node_->find(key);
}

bool JsonSection::integer(std::string_view key, std::int64_t& value, std::int64_t lowest,
                          std::int64_t highest) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  const auto number = whole(*node);
  if (!number || *number < lowest || *number > highest) {
    mistake(key, fmt::format("is {}: {}", node->quoted(), range_text(lowest, highest)));
    return false;
  }
  value = *number;
  return true;
}

bool JsonSection::integer(std::string_view key, std::optional<std::int64_t>& value,
                          std::int64_t lowest, std::int64_t highest) {
  std::int64_t number = 0;
  if (!integer(key, number, lowest, highest)) return false;
  value = number;
  return true;
}

bool JsonSection::integers(std::string_view key, std::vector<std::int64_t>& values,
                           std::int64_t lowest, std::int64_t highest) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  std::vector<std::int64_t> found;
  bool fits =
      node->list() != nullptr && !node->list()->empty() && node->list()->size() <= kMostItems;
  for (std::size_t i = 0; fits && i < node->list()->size(); ++i) {
    const auto number = whole((*node->list())[i]);
    fits = number && *number >= lowest && *number <= highest;
    if (fits) found.push_back(*number);
  }
  if (!fits) {
    mistake(key,
            fmt::format("is {}: it must be a list of 1 to {} whole numbers, each from {} to {}",
                        node->quoted(), kMostItems, lowest, highest));
    return false;
  }
  values = std::move(found);
  return true;
}

bool JsonSection::number(std::string_view key, double& value, Range range) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  const auto number = number_of(*node);
  if (!number) {
    mistake(key, fmt::format("is {}: it must be a number", node->quoted()));
    return false;
  }
  if (!is_inside(*number, range)) {
    mistake(key, fmt::format("is {}: it must be {}", node->quoted(), range_words(range)));
    return false;
  }
  value = *number;
  return true;
}

bool JsonSection::boolean(std::string_view key, bool& value) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  const bool* flag = std::get_if<bool>(&node->value);
  if (flag == nullptr) {
    mistake(key, fmt::format("is {}: it must be true or false", node->quoted()));
    return false;
  }
  value = *flag;
  return true;
}

bool JsonSection::text(std::string_view key, std::string& value) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  if (node->text() == nullptr) {
    mistake(key, fmt::format("is {}: it must be a text in double quotes", node->quoted()));
    return false;
  }
  if (node->text()->find('\0') != std::string::npos) {
    mistake(key, "has a zero byte in it: remove it");
    return false;
  }
  value = *node->text();
  return true;
}

bool JsonSection::texts(std::string_view key, std::vector<std::string>& values) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  std::vector<const JsonNode*> items = {node};
  if (const JsonList* list = node->list()) {
    items.clear();
    for (const JsonNode& item : *list) items.push_back(&item);
  }
  const auto plain = [](const JsonNode* item) {
    return item->text() != nullptr && !item->text()->empty() &&
           item->text()->find('\0') == std::string::npos;
  };
  if (items.empty() || items.size() > kMostItems ||
      !std::all_of(items.begin(), items.end(), plain)) {
    mistake(key, fmt::format("is {}: it must be a text, or a list of 1 to {} texts, none of them "
                             "empty",
                             node->quoted(), kMostItems));
    return false;
  }
  values.clear();
  for (const JsonNode* item : items) values.push_back(*item->text());
  return true;
}

bool JsonSection::numbers(std::string_view key, std::array<double, 2>& values, Range range) {
  const JsonNode* node = find(key);
  if (node == nullptr) return false;
  const JsonList* list = node->list();
  std::array<double, 2> found{};
  bool fits = list != nullptr && list->size() == found.size();
  for (std::size_t i = 0; fits && i < found.size(); ++i) {
    const auto number = number_of((*list)[i]);
    fits = number && is_inside(*number, range);
    if (fits) found[i] = *number;
  }
  if (!fits) {
    mistake(key, fmt::format("is {}: it must be a list of two numbers, each {}", node->quoted(),
                             range_words(range)));
    return false;
  }
  values = found;
  return true;
}

std::vector<std::string> JsonSection::keys_beside(std::string_view key) {
  std::vector<std::string> others;
  if (node_ == nullptr) return others;
  for (const auto& [name, child] : *node_->object()) {
    if (name == key || is_comment(name, child)) continue;
    (void)foreign(name);
    if (!child.is_default()) others.push_back(name);
  }
  return others;
}

std::optional<std::size_t> JsonSection::choice_index(std::string_view key,
                                                     const std::vector<std::string_view>& names) {
  const JsonNode* node = find(key);
  if (node == nullptr) return std::nullopt;
  if (node->text() != nullptr) {
    const auto found = std::find_if(names.begin(), names.end(), [&](std::string_view name) {
      return same_letters(name, *node->text());
    });
    if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  }
  mistake(key, fmt::format("is {}: it must be {}", node->quoted(), alternatives(names)));
  return std::nullopt;
}

bool JsonSection::choices(std::string_view key,
                          std::vector<std::pair<std::string, std::size_t>>& chosen,
                          const std::vector<std::string_view>& names) {
  if (find(key) == nullptr) return false;
  JsonSection inside = section(key);
  inside.allow_anything();
  if (!inside.present()) return false;
  chosen.clear();
  for (const auto& [name, node] : *inside.node_->object()) {
    if (is_comment(name, node)) continue;
    const std::string* word = node.text();
    const auto found = std::ranges::find_if(
        names, [&](std::string_view one) { return word != nullptr && same_letters(one, *word); });
    if (found == names.end())
      mistake(key, fmt::format("has {} for \"{}\": it must be {}", node.quoted(),
                               shorten_quote(name), alternatives(names)));
    else
      chosen.emplace_back(name, static_cast<std::size_t>(found - names.begin()));
  }
  return !has_mistake(key);
}

bool JsonSection::object(std::string_view key, std::string& json) {
  if (find(key) == nullptr) return false;
  JsonSection inside = section(key);
  inside.allow_anything();
  if (inside.present()) json = inside.node_->text_of_value();
  return inside.present();
}

JsonSection JsonSection::section(std::string_view key) {
  const JsonNode* node = find(key);
  if (node != nullptr && node->object() == nullptr) {
    // A section may be asked for by several readers.
    if (!has_mistake(key))
      mistake(key, fmt::format("is {}: it must be a section, {{...}}", node->quoted()));
    node = nullptr;
  }
  return JsonSection(*reader_, node, path(key));
}

void JsonSection::allow(std::span<const std::string_view> keys) {
  for (const std::string_view key : keys) find(key);
}

void JsonSection::allow_anything() { known().anything = true; }

void JsonSection::call(std::string_view title) { known().title = title; }

bool JsonSection::sound(std::span<const std::string_view> keys) const {
  return std::none_of(keys.begin(), keys.end(),
                      [&](std::string_view key) { return has_mistake(key); });
}

void JsonSection::mistake(std::string_view key, const std::string& what) {
  reader_->mistake(path(key), what);
}

void JsonSection::has_no_effect(std::string_view key) {
  auto& all = reader_->without_effect_;
  if (const std::string here = path(key); std::ranges::find(all, here) == all.end())
    all.push_back(here);
}

void JsonSection::missing(std::string_view key, const std::string& what_it_is) {
  // A key that was mistyped is not said to be missing as well.
  if (reader_->has_mistake(path(key))) return;
  mistake(key, "is missing: " + what_it_is);
}

}  // namespace lockstep::train

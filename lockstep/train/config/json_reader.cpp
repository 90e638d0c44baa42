#include <lockstep/train/config/json_reader.h>

#include <algorithm>

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

// The same key in another section is what was meant more likely than a similar one here.
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

}  // namespace lockstep::train

#include <lockstep/train/config/json_reader.h>

#include <algorithm>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/nearest.h>

namespace lockstep::train {

namespace {

constexpr std::size_t kMostMistakes = 20;
std::string readable(std::string text) {
  if (text.size() > 100) text = text.substr(0, 97) + "...";
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

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

JsonSection JsonReader::top() { return JsonSection(*this, &root_, ""); }

void JsonReader::mistake(const std::string& path, const std::string& what) {
  mistake_about(path, fmt::format("{} {}", readable(path), what));
}

void JsonReader::mistake_about(const std::string& path, const std::string& sentence) {
  const JsonNode& node = root_.nearest(path);
  mistakes_.push_back({.path = path, .text = sentence, .line = node.line, .flag = node.flag});
}

bool JsonReader::has_mistake(std::string_view path) const {
  return std::any_of(mistakes_.begin(), mistakes_.end(), [&](const Mistake& mistake) {
    return within(mistake.path, path) || (!mistake.path.empty() && within(path, mistake.path));
  });
}

// The same key in another section is what was meant more likely than a similar one here.
std::string JsonReader::suggestion(const std::string& path, const std::string& key) const {
  std::vector<std::string> elsewhere;
  for (const auto& [section, known] : known_)
    if (has(known.keys, key)) elsewhere.push_back(join_path(section, key));
  if (elsewhere.size() == 1) return fmt::format(": did you mean '{}'?", elsewhere.front());
  const auto found = known_.find(path);
  if (found == known_.end()) return "";
  const std::vector<std::string_view> names(found->second.keys.begin(), found->second.keys.end());
  const std::string nearest = did_you_mean(key, names);
  if (!nearest.empty()) return nearest;
  if (path.empty()) return ": docs/config.md lists them all";
  return names.empty() ? "" : fmt::format(": its keys are {}", fmt::join(names, ", "));
}

void JsonReader::unknown(const JsonNode& node, const std::string& path, const std::string& key) {
  const std::string here = join_path(path, key);
  const std::string& called = known_[path].title;
  const std::string title = !called.empty() ? called : path.empty() ? "a config" : path;
  const std::string meant = suggestion(path, readable(key));
  // Who mistyped a key does not have to hear that it is missing as well.
  if (const auto quote = meant.find('\''); quote != std::string::npos) {
    const std::string name =
        join_path(path, meant.substr(quote + 1, meant.rfind('\'') - quote - 1));
    std::erase_if(mistakes_,
                  [&](const Mistake& other) { return other.missing && other.path == name; });
  }
  mistakes_.push_back({.path = here,
                       .text = fmt::format("{} is no key of {}{}", readable(here), title, meant),
                       .line = node.line,
                       .flag = node.flag});
}

void JsonReader::find_unknown(const JsonNode& node, const std::string& path) {
  const auto known = known_.find(path);
  if (node.object() == nullptr || known == known_.end() || known->second.anything) return;
  for (const auto& [key, child] : *node.object()) {
    if (has(known->second.keys, key))
      find_unknown(child, join_path(path, key));
    else if (!has(known->second.foreign, key))
      unknown(child, path, key);
  }
}

void JsonReader::finish() {
  find_unknown(root_, "");
  if (mistakes_.empty()) return;
  // Of the whole first, then in the file's order, then those of the command line.
  std::stable_sort(mistakes_.begin(), mistakes_.end(), [](const Mistake& a, const Mistake& b) {
    return std::pair(!a.flag.empty(), a.line) < std::pair(!b.flag.empty(), b.line);
  });
  if (mistakes_.size() == 1) {
    const Mistake& only = mistakes_.front();
    const std::string line = only.line == 0 ? "" : fmt::format(":{}", only.line);
    throw UsageError("{}: {}", only.flag.empty() ? file_ + line : only.flag, only.text);
  }
  std::string text = fmt::format("{} has {} mistakes:", file_, mistakes_.size());
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

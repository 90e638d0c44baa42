// Every key of a config is declared once, in describe.cpp: its name, what it means, what it may be.
// Reading a config, writing one, and making docs/config.md's tables or the JSON Schema are walks
// through these declarations.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

// The texts are Markdown, as docs/config.md has them.
struct Key {
  std::string_view name;
  std::string_view meaning = {};
  std::string_view deepspeed = {};   // "same", or what DeepSpeed or Megatron call it
  std::string_view by_default = {};  // in words, where the value that is there does not say it
  std::string_view needed = {};      // what is said where it is missing; empty: it may be
  bool zero_is_auto = false;         // 0 stands for "auto"
  // A word that a choice does not have, and what is said of it.
  std::string_view refused = {};
  std::string_view refused_because = {};
};

struct WholeRange {
  std::int64_t lowest;
  std::int64_t highest;
};

// A walk through the keys of one section. Each key comes with the value that it stands for: a
// reader sets it, other walks look at it. Each function returns whether the document sets the key;
// only readers have a document.
class Keys {
 public:
  virtual ~Keys() = default;
  Keys() = default;
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  virtual bool integer(const Key& key, std::int64_t& value, WholeRange range) = 0;
  virtual bool integer(const Key& key, std::optional<std::int64_t>& value, WholeRange range) = 0;
  virtual bool integers(const Key& key, std::vector<std::int64_t>& values, WholeRange range) = 0;
  virtual bool number(const Key& key, double& value, JsonSection::Range range) = 0;
  virtual bool number(const Key& key, std::optional<double>& value, JsonSection::Range range) = 0;
  virtual bool two_numbers(const Key& key, std::array<double, 2>& values,
                           JsonSection::Range range) = 0;
  virtual bool boolean(const Key& key, bool& value) = 0;
  virtual bool text(const Key& key, std::string& value) = 0;
  virtual bool path(const Key& key, std::filesystem::path& value) = 0;
  virtual bool paths(const Key& key, std::vector<std::filesystem::path>& values) = 0;
  // An object whose keys are free, as JSON.
  virtual bool object(const Key& key, std::string& json) = 0;
  // The word, or a path.
  virtual bool word_or_path(const Key& key, std::string_view word, bool& is_word,
                            std::filesystem::path& value) = 0;

  template <typename Enum, std::size_t N>
  bool choice(const Key& key, Enum& value, const Named<Enum> (&all)[N]) {
    return choice(key, value, std::span<const Named<Enum>>(all));
  }
  template <typename Enum>
  bool choice(const Key& key, Enum& value, std::span<const Named<Enum>> all) {
    std::vector<std::string_view> names;
    std::size_t chosen = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t from_last = all.size() - 1 - i;
      names.push_back(all[i].name);
      if (all[from_last].value == value) chosen = from_last;  // the first of several
    }
    const bool set = choose(key, chosen, names);
    value = all[chosen].value;
    return set;
  }

  // One of these words. A value that is none of them is written as it is.
  bool word(const Key& key, std::string& value, std::vector<std::string> words) {
    auto chosen = static_cast<std::size_t>(std::ranges::find(words, value) - words.begin());
    if (chosen == words.size()) words.push_back(value);
    const std::vector<std::string_view> names(words.begin(), words.end());
    const bool set = choose(key, chosen, names);
    value = words[chosen];
    return set;
  }

  // The index of one of the names.
  bool choice(const Key& key, std::size_t& chosen, const std::vector<std::string_view>& names) {
    return choose(key, chosen, names);
  }

  // A section whose keys are free. Each of them has one of these words.
  template <typename Enum, std::size_t N>
  bool choices(const Key& key, std::vector<std::pair<std::string, Enum>>& values,
               const Named<Enum> (&all)[N]) {
    std::vector<std::string_view> names;
    for (const Named<Enum>& one : all) names.push_back(one.name);
    std::vector<std::pair<std::string, std::size_t>> chosen;
    for (const auto& [name, value] : values)
      chosen.emplace_back(name, std::ranges::find(all, value, &Named<Enum>::value) - all);
    const bool set = choose_each(key, chosen, names);
    values.clear();
    for (const auto& [name, index] : chosen) values.emplace_back(name, all[index].value);
    return set;
  }

  virtual void section(const Key& key, const std::function<void(Keys&)>& describe) = 0;

  // A heading of the tables.
  virtual void chapter(std::string_view /*title*/) {}
  // Sets the name that messages give to the section.
  virtual void call(std::string_view /*title*/) {}
  // Whether to walk through keys that a config has only where `holds`. Walks that show every key
  // that exists go through them in any case.
  virtual bool has(bool holds) = 0;
  // Whether the next keys are written; a reader knows them in any case.
  virtual bool writes(bool /*holds*/) { return true; }
  // From here on values do not matter, because they belong to something that is off.
  virtual void ignore_values() {}
  // Reading: whether the key has a wrong value, so that what it decides is not known.
  virtual bool is_wrong(std::string_view /*name*/) { return false; }
  // From here on it is not known which keys belong here. Keys that are set are still checked, each
  // once, and none counts as missing.
  virtual void of_any_kind() {}
  // Reading: calls `fill` for values that follow from the keys above, before the next key is read.
  virtual void then(const std::function<void()>& /*fill*/) {}
  // Reading: reports that the key has a wrong value.
  virtual void mistake(std::string_view /*name*/, const std::string& /*what*/) {}

 protected:
  virtual bool choose(const Key& key, std::size_t& chosen,
                      const std::vector<std::string_view>& names) = 0;
  virtual bool choose_each(const Key& key, std::vector<std::pair<std::string, std::size_t>>& chosen,
                           const std::vector<std::string_view>& names) = 0;
};

}  // namespace lockstep::train

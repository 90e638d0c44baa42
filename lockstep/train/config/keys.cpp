#include <lockstep/train/config/keys.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

using Json = nlohmann::ordered_json;

class ReadingKeys final : public Keys {
 public:
  ReadingKeys(JsonSection section, const PathReader& paths)
      : section_(std::move(section)), paths_(paths) {}

  bool integer(const Key& key, std::int64_t& value, WholeRange range) override {
    return read(key,
                [&] { return section_.integer(key.name, value, range.lowest, range.highest); });
  }
  bool integer(const Key& key, std::optional<std::int64_t>& value, WholeRange range) override {
    return read(key,
                [&] { return section_.integer(key.name, value, range.lowest, range.highest); });
  }
  bool integers(const Key& key, std::vector<std::int64_t>& values, WholeRange range) override {
    return read(key,
                [&] { return section_.integers(key.name, values, range.lowest, range.highest); });
  }
  bool number(const Key& key, double& value, JsonSection::Range range) override {
    return read(key, [&] { return section_.number(key.name, value, range); });
  }
  bool number(const Key& key, std::optional<double>& value, JsonSection::Range range) override {
    double number = 0;
    if (!read(key, [&] { return section_.number(key.name, number, range); })) return false;
    value = number;
    return true;
  }
  bool two_numbers(const Key& key, std::array<double, 2>& values,
                   JsonSection::Range range) override {
    return read(key, [&] { return section_.numbers(key.name, values, range); });
  }
  bool boolean(const Key& key, bool& value) override {
    return read(key, [&] { return section_.boolean(key.name, value); });
  }
  bool text(const Key& key, std::string& value) override {
    return read(key, [&] { return section_.text(key.name, value); });
  }
  bool path(const Key& key, std::filesystem::path& value) override {
    return read(key, [&] { return paths_.read(section_, key.name, value); });
  }
  bool object(const Key& key, std::string& json) override {
    return read(key, [&] { return section_.object(key.name, json); });
  }
  bool paths(const Key& key, std::vector<std::filesystem::path>& values) override {
    return read(key, [&] {
      std::vector<std::string> texts;
      if (!section_.texts(key.name, texts)) return false;
      values.clear();
      for (const std::string& text : texts)
        values.push_back(paths_.absolute(section_.path(key.name), text));
      return true;
    });
  }
  bool word_or_path(const Key& key, std::string_view word, bool& is_word,
                    std::filesystem::path& value) override {
    return read(key, [&] {
      const JsonNode* node = section_.find(key.name);
      is_word = node != nullptr && node->text() != nullptr && *node->text() == word;
      return is_word || paths_.read(section_, key.name, value);
    });
  }
  void section(const Key& key, const std::function<void(Keys&)>& describe) override {
    ReadingKeys inside(section_.section(key.name), paths_);
    if (!key.needed.empty() && !inside.section_.present())
      section_.missing(key.name, std::string(key.needed));
    describe(inside);
  }
  void call(std::string_view title) override { section_.call(title); }
  bool has(bool holds) override { return holds; }
  void ignore_values() override { ignores_values_ = true; }
  bool is_wrong(std::string_view name) override { return section_.has_mistake(name); }
  void of_any_kind() override { of_any_kind_ = true; }
  void then(const std::function<void()>& fill) override { fill(); }
  void mistake(std::string_view name, const std::string& what) override {
    section_.mistake(name, what);
  }

 protected:
  bool choose(const Key& key, std::size_t& chosen,
              const std::vector<std::string_view>& names) override {
    return read(key, [&] {
      const JsonNode* node = section_.find(key.name);
      if (!key.refused.empty() && node != nullptr && node->text() != nullptr &&
          *node->text() == key.refused) {
        section_.mistake(key.name, fmt::format("is \"{}\", {}", key.refused, key.refused_because));
        return false;
      }
      const auto found = section_.choice_index(key.name, names);
      if (found) chosen = *found;
      return found.has_value();
    });
  }

  bool choose_each(const Key& key, std::vector<std::pair<std::string, std::size_t>>& chosen,
                   const std::vector<std::string_view>& names) override {
    return read(key, [&] { return section_.choices(key.name, chosen, names); });
  }

 private:
  bool read(const Key& key, const std::function<bool()>& value) {
    if (ignores_values_) {
      (void)section_.find(key.name);
      return false;
    }
    if (of_any_kind_ && section_.has_mistake(key.name)) return false;
    if (value()) return true;
    if (!of_any_kind_ && !key.needed.empty()) section_.missing(key.name, std::string(key.needed));
    return false;
  }

  JsonSection section_;
  const PathReader& paths_;
  bool ignores_values_ = false;
  bool of_any_kind_ = false;
};

// The base of walks that do not read: they look at a value as JSON, and at the values it may have.
class LookingKeys : public Keys {
 public:
  bool integer(const Key& key, std::int64_t& value, WholeRange range) override {
    return look(key, key.zero_is_auto && value == 0 ? Json("auto") : Json(value), whole(range));
  }
  bool integer(const Key& key, std::optional<std::int64_t>& value, WholeRange range) override {
    return look(key, value ? Json(*value) : Json("auto"), whole(range));
  }
  bool integers(const Key& key, std::vector<std::int64_t>& values, WholeRange range) override {
    return look(key, values, {{"type", "array"}, {"items", whole(range)}, {"minItems", 1}});
  }
  bool number(const Key& key, double& value, JsonSection::Range range) override {
    return look(key, value, real(range));
  }
  bool number(const Key& key, std::optional<double>& value, JsonSection::Range range) override {
    return look(key, value ? Json(*value) : Json("auto"), real(range));
  }
  bool two_numbers(const Key& key, std::array<double, 2>& values,
                   JsonSection::Range range) override {
    return look(key, values,
                {{"type", "array"}, {"items", real(range)}, {"minItems", 2}, {"maxItems", 2}});
  }
  bool boolean(const Key& key, bool& value) override {
    return look(key, value, {{"type", "boolean"}});
  }
  bool text(const Key& key, std::string& value) override {
    return look(key, value, {{"type", "string"}});
  }
  bool path(const Key& key, std::filesystem::path& value) override {
    return look(key, value.string(), {{"type", "string"}, {"minLength", 1}});
  }
  bool paths(const Key& key, std::vector<std::filesystem::path>& values) override {
    Json list = Json::array();
    for (const auto& path : values) list.push_back(path.string());
    const Json text = {{"type", "string"}, {"minLength", 1}};
    return look(key, list,
                {{"anyOf", {text, {{"type", "array"}, {"items", text}, {"minItems", 1}}}}});
  }
  bool object(const Key& key, std::string& json) override {
    return look(key, Json::parse(json), {{"type", "object"}});
  }
  bool word_or_path(const Key& key, std::string_view word, bool& is_word,
                    std::filesystem::path& value) override {
    return look(key,
                is_word         ? Json(word)
                : value.empty() ? Json("auto")
                                : Json(value.string()),
                {{"type", "string"}, {"minLength", 1}});
  }

 protected:
  virtual bool look(const Key& key, const Json& value, const Json& schema) = 0;
  bool choose(const Key& key, std::size_t& chosen,
              const std::vector<std::string_view>& names) override {
    return look(key, names[chosen], {{"enum", names}});
  }
  bool choose_each(const Key& key, std::vector<std::pair<std::string, std::size_t>>& chosen,
                   const std::vector<std::string_view>& names) override {
    Json object = Json::object();
    for (const auto& [name, index] : chosen) object[name] = names[index];
    return look(key, object, {{"type", "object"}, {"additionalProperties", {{"enum", names}}}});
  }

 private:
  static Json whole(WholeRange range) {
    return {{"type", "integer"}, {"minimum", range.lowest}, {"maximum", range.highest}};
  }
  static Json real(const JsonSection::Range& range) {
    Json schema = {{"type", "number"},
                   {range.above_lowest ? "exclusiveMinimum" : "minimum", range.lowest}};
    if (!std::isinf(range.highest))
      schema[range.below_highest ? "exclusiveMaximum" : "maximum"] = range.highest;
    return schema;
  }
};

class WritingKeys final : public LookingKeys {
 public:
  explicit WritingKeys(Json& object) : object_(object) { object_ = Json::object(); }

  void section(const Key& key, const std::function<void(Keys&)>& describe) override {
    Json inside;
    WritingKeys keys(inside);
    describe(keys);
    if (!inside.empty()) object_[std::string(key.name)].update(inside);
  }
  bool has(bool holds) override { return holds; }
  bool writes(bool holds) override { return holds; }

 private:
  bool look(const Key& key, const Json& value, const Json& /*schema*/) override {
    object_[std::string(key.name)] = value;
    return false;
  }

  Json& object_;
};

// Sections are described in several places; these are one section to them.
class TableKeys final : public LookingKeys {
 public:
  TableKeys(std::map<std::string, std::string>& tables, std::string path, std::string title)
      : tables_(tables), path_(std::move(path)), title_(std::move(title)) {}

  void section(const Key& key, const std::function<void(Keys&)>& describe) override {
    TableKeys inside(tables_, join_path(path_, key.name), title_);
    describe(inside);
  }
  void chapter(std::string_view title) override { title_ = title; }
  bool has(bool /*holds*/) override { return true; }

 private:
  bool look(const Key& key, const Json& value, const Json& /*schema*/) override {
    std::string by_default(key.by_default);
    if (by_default.empty() && !key.needed.empty()) by_default = "needed";
    if (by_default.empty() && value != Json("") && !(value.is_array() && value.empty()))
      by_default = fmt::format("`{}`", value.dump());
    tables_[title_] += fmt::format("| `{}` | {} | {} | {} |\n", join_path(path_, key.name),
                                   by_default, key.deepspeed, key.meaning);
    return false;
  }

  std::map<std::string, std::string>& tables_;
  const std::string path_;
  std::string title_;
};

// A Markdown text without its marks.
std::string plain(std::string_view markdown) {
  std::string text;
  for (std::size_t i = 0; i < markdown.size(); ++i) {
    if (markdown[i] == '[' || markdown[i] == '`') continue;
    if (markdown.substr(i).starts_with("](")) {
      i = markdown.find(')', i);
      continue;
    }
    text += markdown[i];
  }
  return text;
}

Json open_object() {
  return {{"type", "object"},
          {"properties", Json::object()},
          // Comments, as the reader takes them.
          {"patternProperties", {{"^(_|//)", Json::object()}}},
          {"additionalProperties", false}};
}

class SchemaKeys final : public LookingKeys {
 public:
  explicit SchemaKeys(Json& object) : object_(object) {
    if (object_.is_null()) object_ = open_object();
  }

  void section(const Key& key, const std::function<void(Keys&)>& describe) override {
    SchemaKeys inside(object_["properties"][std::string(key.name)]);
    describe(inside);
    if (!key.needed.empty()) object_["required"].push_back(key.name);
  }
  bool has(bool /*holds*/) override { return true; }

 private:
  bool look(const Key& key, const Json& value, const Json& schema) override {
    // "auto" and null ask for the default.
    Json described = {{"description", plain(key.meaning)},
                      {"anyOf", {schema, {{"enum", {"auto", nullptr}}}}}};
    if (key.by_default.empty() && key.needed.empty() && value != Json(""))
      described["default"] = value;
    Json& property = object_["properties"][std::string(key.name)];
    if (property.is_null() || property == described)
      property = std::move(described);
    else
      add_meaning(property, described, schema);
    return false;
  }

  // Several optimizers, or schedules, have a key of this name.
  static void add_meaning(Json& property, const Json& described, const Json& schema) {
    auto text = property["description"].get<std::string>();
    const auto other = described["description"].get<std::string>();
    if (text.find(other) == std::string::npos) property["description"] = text + "; or: " + other;
    Json& allowed = property["anyOf"];
    if (std::ranges::find(allowed, schema) == allowed.end()) allowed.push_back(schema);
    if (property.value("default", Json()) != described.value("default", Json()))
      property.erase("default");
  }

  Json& object_;
};

void add_deepspeed_keys(Json& schema) {
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    Json* object = &schema;
    std::string_view name = key.path;
    for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      object = &(*object)["properties"][std::string(name.substr(0, dot))];
      if (object->is_null()) *object = open_object();
      name.remove_prefix(dot + 1);
    }
    constexpr std::string_view kSays[] = {"No effect", "Not here", "Another key"};
    const bool none = key.fate == DeepSpeedKey::Fate::no_effect;
    const Json property = {
        {"description",
         fmt::format("{}: {}", kSays[static_cast<std::size_t>(key.fate)], plain(key.words))}};
    const auto add = [&](const std::string& called) {
      Json& properties = (*object)["properties"];
      if (!properties.contains(called)) properties[called] = property;
    };
    add(std::string(name));
    if (key.path.starts_with("zero_optimization.") && none) add("stage3_" + std::string(name));
  }
}

}  // namespace

void read_keys(JsonSection& top, const PathReader& paths, TrainConfig& config) {
  ReadingKeys keys(top, paths);
  describe(keys, config);
}

std::string to_json(const TrainConfig& config) {
  Json root;
  TrainConfig walked = config;
  WritingKeys keys(root);
  describe(keys, walked);
  // A folder's name may be no UTF-8; that must not cost us the rest.
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::map<std::string, std::string> key_tables() {
  std::map<std::string, std::string> tables;
  TrainConfig config;
  TableKeys keys(tables, "", "");
  describe(keys, config);
  return tables;
}

std::string config_schema() {
  Json schema = open_object();
  TrainConfig config;
  SchemaKeys keys(schema);
  describe(keys, config);
  add_deepspeed_keys(schema);
  Json root = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
               {"title", "The config of `lockstep train`"}};
  root.update(schema);
  return root.dump(2) + "\n";
}

}  // namespace lockstep::train

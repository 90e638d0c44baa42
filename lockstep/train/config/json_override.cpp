#include <algorithm>
#include <iterator>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/train/config/json_tree.h>

namespace lockstep::train {

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

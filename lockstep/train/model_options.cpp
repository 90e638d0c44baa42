#include <lockstep/train/model_options.h>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep {

using nlohmann::json;

ModelOptions::ModelOptions(std::string_view text) {
  const json given = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!given.is_object()) throw UsageError("the options of a model are no JSON object: {}", text);
  for (const auto& [name, value] : given.items()) values_[name] = value.dump();
}

template <typename Value, typename Fits>
Value ModelOptions::value(const std::string& name, Value otherwise, const char* what,
                          const Fits& fits) const {
  asked_.insert(name);
  const auto found = values_.find(name);
  if (found == values_.end()) return otherwise;
  const json given = json::parse(found->second);
  if (!fits(given))
    throw UsageError("model.options.{} is {}: it must be {}", name, found->second, what);
  return given.get<Value>();
}

std::int64_t ModelOptions::integer(const std::string& name, std::int64_t otherwise) const {
  return value(name, otherwise, "a whole number",
               [](const json& given) { return given.is_number_integer(); });
}

double ModelOptions::number(const std::string& name, double otherwise) const {
  return value(name, otherwise, "a number", [](const json& given) { return given.is_number(); });
}

bool ModelOptions::boolean(const std::string& name, bool otherwise) const {
  return value(name, otherwise, "true or false",
               [](const json& given) { return given.is_boolean(); });
}

std::string ModelOptions::text(const std::string& name, const std::string& otherwise) const {
  return value(name, otherwise, "a text", [](const json& given) { return given.is_string(); });
}

void ModelOptions::check_all_known(const std::string& model) const {
  for (const auto& [name, given] : values_)
    if (!asked_.contains(name))
      throw UsageError("model.options has \"{}\", which {} does not know: {}", name, model,
                       asked_.empty() ? "it has no options"
                                      : fmt::format("it knows {}", fmt::join(asked_, ", ")));
}

}  // namespace lockstep

#include <lockstep/checkpoint/safetensors/strict_json.h>

#include <set>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

using nlohmann::json;

json parse_strictly(std::string_view text, const std::string& file, int deepest) {
  std::vector<std::set<std::string>> open_objects;
  const auto check = [&](int depth, json::parse_event_t event, const json& parsed) {
    if (depth > deepest)
      throw UsageError("{}: nested deeper than the {} levels it should have", file, deepest);
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second)
        throw UsageError("{}: the key {} is there twice", file, quote(key));
    }
    return true;
  };
  // The parser takes a zero byte for the end.
  if (const auto zero = text.find('\0'); zero != std::string_view::npos)
    throw UsageError("{}, byte {}: not valid JSON", file, zero + 1);
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& problem) {
    throw UsageError("{}, byte {}: not valid JSON", file, problem.byte);
  } catch (const json::out_of_range&) {
    throw UsageError("{}: has a number that is too large", file);
  }
}

std::string read_text(const std::filesystem::path& path, std::uint64_t most_bytes) {
  const MappedFile file(path);
  if (file.size() > most_bytes)
    throw UsageError("'{}' has {} bytes; at most {} are accepted", path.string(), file.size(),
                     most_bytes);
  const auto bytes = file.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void JsonPlace::fail(const std::string& what) const {
  if (place_.empty()) throw UsageError("{}: {}", file_, what);
  throw UsageError("{}, {}: {}", file_, quote(place_), what);
}

JsonPlace JsonPlace::at(const std::string& key) const {
  const auto found = object().find(key);
  if (found == value_.end()) fail(fmt::format("the key {} is missing", quote(key)));
  return {file_, *found, place_.empty() ? key : fmt::format("{}.{}", place_, key)};
}

JsonPlace JsonPlace::at(std::size_t index) const {
  if (index >= array_size()) fail(fmt::format("has {} elements, not {}", array_size(), index + 1));
  return {file_, value_[index], fmt::format("{}[{}]", place_, index)};
}

std::size_t JsonPlace::array_size() const {
  if (!value_.is_array()) fail("not an array");
  return value_.size();
}

const json& JsonPlace::object() const {
  if (!value_.is_object()) fail("not an object");
  return value_;
}

const std::string& JsonPlace::text() const {
  if (!value_.is_string()) fail("not a text");
  return value_.get_ref<const std::string&>();
}

}  // namespace lockstep::checkpoint

// JSON from files that nobody vouches for: bounded, each key once, and errors that name the place.
// Only our .cpp files include this.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::checkpoint {

// Throws a UsageError that begins with `file` where the text is no JSON, names a key twice in one
// object, or is nested deeper than `deepest` levels.
nlohmann::json parse_strictly(std::string_view text, const std::string& file, int deepest);

// A file's text; UsageError where it is missing, unreadable or larger than `most_bytes`.
std::string read_text(const std::filesystem::path& path, std::uint64_t most_bytes);

// A value and its place in the document, for messages. Refers to the file's name and the value that
// it is made from.
class JsonPlace {
 public:
  JsonPlace(const std::string& file, const nlohmann::json& value, std::string place = "")
      : file_(file), value_(value), place_(std::move(place)) {}

  [[noreturn]] void fail(const std::string& what) const;

  // UsageError that names the key where it is missing.
  JsonPlace at(const std::string& key) const;
  // UsageError where it is no array, or has no element of this index.
  JsonPlace at(std::size_t index) const;
  std::size_t array_size() const;
  // This value as an object.
  const nlohmann::json& object() const;
  const std::string& text() const;

  template <typename Integer>
  Integer integer(Integer lowest = std::numeric_limits<Integer>::min()) const {
    using Limits = std::numeric_limits<Integer>;
    const bool fits =
        value_.is_number_unsigned()
            ? value_.get<std::uint64_t>() <= static_cast<std::uint64_t>(Limits::max())
            : value_.is_number_integer() && Limits::is_signed &&
                  value_.get<std::int64_t>() >= static_cast<std::int64_t>(Limits::min());
    if (!fits || value_.get<Integer>() < lowest)
      fail(fmt::format("not a whole number from {} to {}", lowest, Limits::max()));
    return value_.get<Integer>();
  }

 private:
  const std::string& file_;
  const nlohmann::json& value_;
  std::string place_;
};

}  // namespace lockstep::checkpoint

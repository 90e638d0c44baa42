// The options that a config gives a model of one's own.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace lockstep {

// The values of `model.options` in a config. A model asks for each option that it has, with a
// default; an option of the config that nobody has asked for is a mistake.
//
// A value. Failure: UsageError for an option of another type.
class ModelOptions {
 public:
  // UsageError if the text is no JSON object.
  explicit ModelOptions(std::string_view json = "{}");

  std::int64_t integer(const std::string& name, std::int64_t otherwise) const;
  double number(const std::string& name, double otherwise) const;
  bool boolean(const std::string& name, bool otherwise) const;
  std::string text(const std::string& name, const std::string& otherwise) const;

  // UsageError that names options which nobody has asked for, and those that were.
  void check_all_known(const std::string& model) const;

 private:
  template <typename Value, typename Fits>
  Value value(const std::string& name, Value otherwise, const char* what, const Fits& fits) const;

  std::map<std::string, std::string> values_;  // as JSON
  mutable std::set<std::string> asked_;
};

}  // namespace lockstep

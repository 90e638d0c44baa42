// How options of optimizers and schedules describe themselves: each number once, with its range,
// its meaning and its default.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::optim {

struct NumberRange {
  double lowest = 0;
  double highest = std::numeric_limits<double>::infinity();
  bool above_lowest = false;   // lowest itself is outside
  bool below_highest = false;  // highest itself is outside
};

struct CountRange {
  std::int64_t lowest = 0;
  std::int64_t highest = 1'000'000'000'000;
};

// The texts are Markdown, as docs/config.md has them.
struct OptionKey {
  std::string_view name;
  std::string_view meaning = {};
  std::string_view deepspeed = "same";  // what DeepSpeed calls it; empty: it has no such key
  std::string_view by_default = {};     // in words, where the value that is there does not say it
  std::string_view needed = {};         // what is said where it is missing; empty: it may be
  bool zero_is_auto = false;            // 0 stands for "auto"
  bool written = true;                  // whether a config that is written has it
};

// A visitor of options, which reads, writes, checks or lists them.
class OptionKeys {
 public:
  virtual ~OptionKeys() = default;

  virtual void number(const OptionKey& key, double& value, const NumberRange& range) = 0;
  virtual void number(const OptionKey& key, std::optional<double>& value,
                      const NumberRange& range) = 0;
  virtual void two_numbers(const OptionKey& key, std::array<double, 2>& values,
                           const NumberRange& range) = 0;
  virtual void integer(const OptionKey& key, std::int64_t& value, const CountRange& range) = 0;
  virtual void integer(const OptionKey& key, std::optional<std::int64_t>& value,
                       const CountRange& range) = 0;
  virtual void boolean(const OptionKey& key, bool& value) = 0;
  // The index of one of the names.
  virtual void choice(const OptionKey& key, std::size_t& chosen,
                      const std::vector<std::string_view>& names) = 0;
  // Reading: what follows from the keys above, before the next is read.
  virtual void then(const std::function<void()>& /*fill*/) {}
};

// A key whose value does not fit those of others.
struct OptionMistake {
  std::string_view key;
  std::vector<std::string_view> judged_with;
  std::string what;  // "is true, but momentum is 0: …"
};

}  // namespace lockstep::optim

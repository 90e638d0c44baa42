#include <lockstep/optim/options/optimizer_options.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include <lockstep/base/error.h>

namespace lockstep::optim {

namespace {

class TextKeys final : public OptionKeys {
 public:
  void number(const OptionKey& key, double& value, const NumberRange& /*range*/) override {
    add(key, fmt::format("{}", value));
  }
  void two_numbers(const OptionKey& key, std::array<double, 2>& values,
                   const NumberRange& /*range*/) override {
    add(key, fmt::format("{}, {}", values[0], values[1]));
  }
  void number(const OptionKey& key, std::optional<double>& value,
              const NumberRange& /*range*/) override {
    add(key, value ? fmt::format("{}", *value) : "auto");
  }
  void integer(const OptionKey& key, std::int64_t& value, const CountRange& /*range*/) override {
    add(key, fmt::format("{}", value));
  }
  void integer(const OptionKey& key, std::optional<std::int64_t>& value,
               const CountRange& /*range*/) override {
    add(key, value ? fmt::format("{}", *value) : "auto");
  }
  void boolean(const OptionKey& key, bool& value) override { add(key, fmt::format("{}", value)); }
  void choice(const OptionKey& key, std::size_t& chosen,
              const std::vector<std::string_view>& names) override {
    add(key, std::string(names[chosen]));
  }

  std::vector<OptionText> take() { return std::move(texts_); }

 private:
  void add(const OptionKey& key, std::string value) {
    texts_.push_back({std::string(key.name), std::move(value)});
  }

  std::vector<OptionText> texts_;
};

class CheckingKeys final : public OptionKeys {
 public:
  explicit CheckingKeys(std::string_view optimizer) : optimizer_(optimizer) {}

  void number(const OptionKey& key, double& value, const NumberRange& range) override {
    check(std::string(key.name), value, range);
  }
  void two_numbers(const OptionKey& key, std::array<double, 2>& values,
                   const NumberRange& range) override {
    for (std::size_t i = 0; i < values.size(); ++i)
      check(fmt::format("{}[{}]", key.name, i), values[i], range);
  }
  void number(const OptionKey& key, std::optional<double>& value,
              const NumberRange& range) override {
    if (value) check(std::string(key.name), *value, range);
  }
  void integer(const OptionKey& key, std::int64_t& value, const CountRange& range) override {
    check(key, value, range);
  }
  void integer(const OptionKey& key, std::optional<std::int64_t>& value,
               const CountRange& range) override {
    if (value) check(key, *value, range);
  }
  void boolean(const OptionKey& /*key*/, bool& /*value*/) override {}
  void choice(const OptionKey& /*key*/, std::size_t& /*chosen*/,
              const std::vector<std::string_view>& /*names*/) override {}

 private:
  void check(const OptionKey& key, std::int64_t value, const CountRange& range) const {
    if (value < range.lowest || value > range.highest)
      throw UsageError("{}: {} is {}; it must be from {} to {}", optimizer_, key.name, value,
                       range.lowest, range.highest);
  }
  void check(const std::string& name, double value, const NumberRange& range) const {
    // A NaN is refused, too.
    const bool high_enough = range.above_lowest ? value > range.lowest : value >= range.lowest;
    const bool low_enough = range.below_highest ? value < range.highest : value <= range.highest;
    if (std::isfinite(value) && high_enough && low_enough) return;
    std::string needed =
        fmt::format("{} {}", range.above_lowest ? "above" : "at least", range.lowest);
    if (std::isfinite(range.highest))
      needed += fmt::format(" and {} {}", range.below_highest ? "below" : "at most", range.highest);
    throw UsageError("{}: {} is {}; it must be {}", optimizer_, name, value, needed);
  }

  std::string_view optimizer_;
};

}  // namespace

void OptimizerOptions::describe(OptionKeys& keys) {
  options_ = options_->clone();
  options_->describe(keys);
}

double OptimizerOptions::matrix_state_bytes() const {
  return kFloatBytes * static_cast<double>(options_->matrix_state_names().size());
}

std::optional<double> OptimizerOptions::saved_state_bytes() const {
  const double of_floats = kFloatBytes * static_cast<double>(state_names().size());
  return state_bytes() == of_floats ? std::nullopt : std::optional(of_floats);
}

void OptimizerOptions::set_learning_rate(double lr) {
  options_ = options_->clone();
  options_->set_learning_rate(lr);
}

bool is_hidden_matrix(std::string_view name, std::span<const std::int64_t> shape) {
  if (shape.size() < 2 || std::ranges::count(shape, 0) > 0) return false;
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::array<std::string_view, 4> kNames = {"embed", "lm_head", "wte", "wpe"};
  return std::ranges::none_of(
      kNames, [&](std::string_view part) { return lower.find(part) != std::string::npos; });
}

std::vector<OptionText> texts_of(OptimizerOptions options) {
  TextKeys keys;
  options.describe(keys);
  return keys.take();
}

void check_options(std::string_view name, OptimizerOptions options) {
  CheckingKeys keys(name);
  options.describe(keys);
  for (const OptionMistake& mistake : options.mistakes(""))
    throw UsageError("{}: {} {}", name, mistake.key, mistake.what);
}

}  // namespace lockstep::optim

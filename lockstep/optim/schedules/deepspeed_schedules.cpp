#include <lockstep/optim/schedules/deepspeed_schedules.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <lockstep/base/error.h>
#include <lockstep/optim/schedules/schedule.h>

namespace lockstep::optim {

namespace {

constexpr NumberRange kRate = {.lowest = 0, .highest = 1000};
constexpr NumberRange kRatio = {.lowest = 0, .highest = 1};
constexpr NumberRange kDecayRate = {.lowest = 0, .highest = 1e6};
constexpr CountRange kSteps = {.lowest = 0};
constexpr CountRange kAtLeastOne = {.lowest = 1};

// Collects the mistakes in a schedule's options, to report all of them at once.
class Checks {
 public:
  template <typename... Args>
  void require(bool right, std::string_view key, std::vector<std::string_view> judged_with,
               fmt::format_string<Args...> wrong, Args&&... args) {
    if (!right)
      mistakes_.push_back(
          {key, std::move(judged_with), fmt::format(wrong, std::forward<Args>(args)...)});
  }

  void rate(std::string_view key, double value) {
    require(std::isfinite(value) && value >= 0, key, {}, "is {}; it must be a number from 0 up",
            value);
  }

  void count(std::string_view key, std::int64_t value, std::int64_t least) {
    require(value >= least, key, {}, "is {}; it must be at least {}", value, least);
  }

  void order(std::string_view low_key, double low, std::string_view high_key, double high) {
    require(!(low > high), low_key, {high_key}, "is {}, above {}, which is {}", low, high_key,
            high);
  }

  void ratio(std::string_view key, double value) {
    rate(key, value);
    require(!(value > 1), key, {}, "is {}, above the learning rate's ratio, which is 1", value);
  }

  // 0 is a length that is not known yet.
  void total(std::int64_t total_num_steps, std::int64_t warmup_num_steps) {
    require(total_num_steps >= 0, "total_num_steps", {},
            "is {}; set it to the number of steps of the whole training", total_num_steps);
    require(total_num_steps < 1 || warmup_num_steps <= total_num_steps, "warmup_num_steps",
            {"total_num_steps"},
            "is {}, more than total_num_steps, which is {}: the warm-up would never end",
            warmup_num_steps, total_num_steps);
  }

  std::vector<OptionMistake> take() { return std::move(mistakes_); }

 private:
  std::vector<OptionMistake> mistakes_;
};

void need_length(const char* schedule, std::int64_t total_num_steps) {
  if (total_num_steps < 1)
    throw UsageError("{}: total_num_steps is {}; set it to the number of steps of the whole "
                     "training",
                     schedule, total_num_steps);
}

// From 0 to 1 over the first steps.
class Warmup {
 public:
  Warmup(std::int64_t num_steps, WarmupType type)
      : num_steps_(std::max<std::int64_t>(2, num_steps)), type_(type) {}

  std::int64_t num_steps() const { return num_steps_; }

  // For i in [0, num_steps).
  double at(std::int64_t i) const {
    const auto n = static_cast<double>(num_steps_);
    if (type_ == WarmupType::linear) return static_cast<double>(i) / n;
    return std::log(static_cast<double>(i) + 1) / std::log(n);
  }

 private:
  std::int64_t num_steps_;
  WarmupType type_;
};

// Counts as DeepSpeed does: i is -1 in the first step.
class CountedSchedule : public Schedule {
 public:
  double learning_rate(std::int64_t step) const final {
    if (step < 0)
      throw UsageError("the learning rate of step {} was asked for; steps count from 0", step);
    return at(step - 1);
  }

 private:
  virtual double at(std::int64_t i) const = 0;
};

class ConstantSchedule final : public CountedSchedule {
 public:
  explicit ConstantSchedule(double lr) : lr_(lr) {}

 private:
  double at(std::int64_t) const override { return lr_; }

  double lr_;
};

// Without a total number of steps there is no decay.
class WarmupSchedule final : public CountedSchedule {
 public:
  WarmupSchedule(const WarmupLR& options, double base_lr,
                 std::optional<std::int64_t> total_num_steps)
      : warmup_(options.warmup_num_steps, options.warmup_type),
        min_(options.warmup_min_lr),
        max_(options.warmup_max_lr.value_or(base_lr)),
        total_(total_num_steps) {}

 private:
  double at(std::int64_t i) const override {
    if (i < 0) return min_;
    if (i < warmup_.num_steps()) return min_ + (max_ - min_) * warmup_.at(i);
    if (!total_) return max_;
    const auto left = static_cast<double>(std::max<std::int64_t>(0, *total_ - i));
    const auto length =
        static_cast<double>(std::max<std::int64_t>(1, *total_ - warmup_.num_steps()));
    return min_ + (max_ - min_) * (left / length);
  }

  Warmup warmup_;
  double min_;
  double max_;
  std::optional<std::int64_t> total_;
};

class CosineSchedule final : public CountedSchedule {
 public:
  CosineSchedule(const WarmupCosineLR& options, double base_lr)
      : options_(options),
        warmup_(options.warmup_num_steps, options.warmup_type),
        base_lr_(base_lr) {}

 private:
  double at(std::int64_t i) const override { return i < 0 ? 0 : base_lr_ * ratio(i); }

  double ratio(std::int64_t i) const {
    const std::int64_t warm_steps = warmup_.num_steps();
    if (i < warm_steps)
      return options_.warmup_min_ratio + (1 - options_.warmup_min_ratio) * warmup_.at(i);
    const auto length =
        static_cast<double>(std::max<std::int64_t>(1, options_.total_num_steps - warm_steps));
    const double x = std::min(1.0, static_cast<double>(i - warm_steps + 1) / length);
    const double fall = (1 + std::cos(std::numbers::pi * x)) / 2;
    return options_.cos_min_ratio + (1 - options_.cos_min_ratio) * fall;
  }

  WarmupCosineLR options_;
  Warmup warmup_;
  double base_lr_;
};

class OneCycleSchedule final : public CountedSchedule {
 public:
  explicit OneCycleSchedule(const OneCycle& options)
      : options_(options),
        first_(static_cast<double>(options.cycle_first_step_size)),
        total_(first_ + static_cast<double>(options.cycle_second_step_size.value_or(
                            options.cycle_first_step_size))) {}

 private:
  double at(std::int64_t i) const override {
    const double low = options_.cycle_min_lr;
    const double k = static_cast<double>(i) + 1;
    if (static_cast<double>(i) >= total_) {
      if (options_.decay_step_size == 0) return low;
      const double intervals = (k - total_) / static_cast<double>(options_.decay_step_size);
      return low / (1 + options_.decay_lr_rate * intervals);
    }
    const double x = k / total_ - std::floor(k / total_);
    const double turn = first_ / total_;
    const double height = x <= turn ? x / turn : (x - 1) / (turn - 1);
    return low + (options_.cycle_max_lr - low) * height;
  }

  OneCycle options_;
  double first_;
  double total_;
};

class RangeTestSchedule final : public CountedSchedule {
 public:
  explicit RangeTestSchedule(const LRRangeTest& options) : options_(options) {}

 private:
  double at(std::int64_t i) const override {
    double intervals =
        (static_cast<double>(i) + 1) / static_cast<double>(options_.lr_range_test_step_size);
    if (options_.lr_range_test_staircase) intervals = std::floor(intervals);
    return options_.lr_range_test_min_lr * (1 + options_.lr_range_test_step_rate * intervals);
  }

  LRRangeTest options_;
};

void describe_total(OptionKeys& keys, const RunFacts& run, std::int64_t& value) {
  keys.then([&] { value = run.num_steps; });
  keys.integer({.name = "total_num_steps",
                .meaning = "steps until the rate is at its end",
                .by_default = "`max_steps`, or what the data gives",
                .zero_is_auto = true},
               value, kAtLeastOne);
}

void describe_rise(OptionKeys& keys, const RunFacts& run, auto& options) {
  keys.number({.name = "warmup_min_lr", .meaning = "learning rate at first"}, options.warmup_min_lr,
              kRate);
  keys.then([&] { options.warmup_max_lr = run.learning_rate; });
  keys.number({.name = "warmup_max_lr",
               .meaning = "learning rate after the warm-up",
               .by_default = "`optimizer.params.lr`"},
              options.warmup_max_lr, kRate);
}

void describe_steps_of_rise(OptionKeys& keys, auto& options) {
  keys.integer({.name = "warmup_num_steps", .meaning = "steps of the warm-up"},
               options.warmup_num_steps, kSteps);
  auto type = static_cast<std::size_t>(options.warmup_type);
  keys.choice({.name = "warmup_type", .meaning = "`\"log\"` or `\"linear\"`"}, type,
              {"log", "linear"});
  options.warmup_type = static_cast<WarmupType>(type);
}

std::vector<OptionMistake> rise_mistakes(const auto& options, double base_lr,
                                         std::optional<std::int64_t> total_num_steps) {
  const double highest = options.warmup_max_lr.value_or(base_lr);
  Checks checks;
  checks.rate("warmup_min_lr", options.warmup_min_lr);
  checks.rate("warmup_max_lr", highest);
  checks.order("warmup_min_lr", options.warmup_min_lr, "warmup_max_lr", highest);
  checks.count("warmup_num_steps", options.warmup_num_steps, 0);
  if (total_num_steps) checks.total(*total_num_steps, options.warmup_num_steps);
  return checks.take();
}

}  // namespace

void Constant::describe(OptionKeys& /*keys*/, const RunFacts& /*run*/) {}

std::vector<OptionMistake> Constant::mistakes(double /*base_lr*/) const { return {}; }

std::unique_ptr<Schedule> Constant::make(double base_lr) const {
  return std::make_unique<ConstantSchedule>(base_lr);
}

void WarmupLR::describe(OptionKeys& keys, const RunFacts& run) {
  describe_rise(keys, run, *this);
  describe_steps_of_rise(keys, *this);
}

std::vector<OptionMistake> WarmupLR::mistakes(double base_lr) const {
  return rise_mistakes(*this, base_lr, {});
}

std::unique_ptr<Schedule> WarmupLR::make(double base_lr) const {
  return std::make_unique<WarmupSchedule>(*this, base_lr, std::nullopt);
}

void WarmupDecayLR::describe(OptionKeys& keys, const RunFacts& run) {
  describe_total(keys, run, total_num_steps);
  describe_rise(keys, run, *this);
  describe_steps_of_rise(keys, *this);
}

std::vector<OptionMistake> WarmupDecayLR::mistakes(double base_lr) const {
  return rise_mistakes(*this, base_lr, total_num_steps);
}

std::unique_ptr<Schedule> WarmupDecayLR::make(double base_lr) const {
  need_length("WarmupDecayLR", total_num_steps);
  return std::make_unique<WarmupSchedule>(WarmupLR{.warmup_min_lr = warmup_min_lr,
                                                   .warmup_max_lr = warmup_max_lr,
                                                   .warmup_num_steps = warmup_num_steps,
                                                   .warmup_type = warmup_type},
                                          base_lr, total_num_steps);
}

void WarmupCosineLR::describe(OptionKeys& keys, const RunFacts& run) {
  describe_total(keys, run, total_num_steps);
  keys.number(
      {.name = "warmup_min_ratio", .meaning = "share of the learning rate that it begins with"},
      warmup_min_ratio, kRatio);
  describe_steps_of_rise(keys, *this);
  keys.number({.name = "cos_min_ratio", .meaning = "share that is left in the end"}, cos_min_ratio,
              kRatio);
}

std::vector<OptionMistake> WarmupCosineLR::mistakes(double /*base_lr*/) const {
  Checks checks;
  checks.ratio("warmup_min_ratio", warmup_min_ratio);
  checks.ratio("cos_min_ratio", cos_min_ratio);
  checks.count("warmup_num_steps", warmup_num_steps, 0);
  checks.total(total_num_steps, warmup_num_steps);
  return checks.take();
}

std::unique_ptr<Schedule> WarmupCosineLR::make(double base_lr) const {
  need_length("WarmupCosineLR", total_num_steps);
  return std::make_unique<CosineSchedule>(*this, base_lr);
}

void OneCycle::describe(OptionKeys& keys, const RunFacts& /*run*/) {
  keys.number({.name = "cycle_min_lr",
               .meaning = "learning rate that the cycle starts from",
               .needed = "the learning rate that the cycle starts from"},
              cycle_min_lr, kRate);
  keys.number({.name = "cycle_max_lr",
               .meaning = "learning rate in the middle of the cycle",
               .needed = "the learning rate in the middle of the cycle"},
              cycle_max_lr, kRate);
  keys.number({.name = "decay_lr_rate", .meaning = "decay after the cycle"}, decay_lr_rate,
              kDecayRate);
  keys.integer({.name = "cycle_first_step_size", .meaning = "steps up"}, cycle_first_step_size,
               kAtLeastOne);
  keys.then([&] { cycle_second_step_size = cycle_first_step_size; });
  keys.integer(
      {.name = "cycle_second_step_size", .meaning = "steps down", .by_default = "as the first"},
      cycle_second_step_size, kAtLeastOne);
  keys.integer({.name = "decay_step_size", .meaning = "steps between decays; 0: no decay"},
               decay_step_size, kSteps);
  keys.boolean({.name = "cycle_momentum",
                .meaning = "must be false: the momentum is not cycled",
                .deepspeed = "same (true)",
                .written = false},
               cycle_momentum);
}

std::vector<OptionMistake> OneCycle::mistakes(double /*base_lr*/) const {
  Checks checks;
  checks.rate("cycle_min_lr", cycle_min_lr);
  checks.rate("cycle_max_lr", cycle_max_lr);
  checks.order("cycle_min_lr", cycle_min_lr, "cycle_max_lr", cycle_max_lr);
  checks.require(cycle_max_lr != 0 || cycle_min_lr != 0, "cycle_max_lr", {"cycle_min_lr"},
                 "is 0; set cycle_min_lr and cycle_max_lr");
  checks.rate("decay_lr_rate", decay_lr_rate);
  checks.count("cycle_first_step_size", cycle_first_step_size, 1);
  if (cycle_second_step_size) checks.count("cycle_second_step_size", *cycle_second_step_size, 1);
  checks.count("decay_step_size", decay_step_size, 0);
  checks.require(!(decay_lr_rate > 0) || decay_step_size != 0, "decay_lr_rate", {"decay_step_size"},
                 "is {}, but decay_step_size is 0, which means no decay: set how many steps the "
                 "rate is for",
                 decay_lr_rate);
  checks.require(!cycle_momentum, "cycle_momentum", {},
                 "is true: Lockstep cycles the learning rate only; set it to false");
  return checks.take();
}

std::unique_ptr<Schedule> OneCycle::make(double /*base_lr*/) const {
  return std::make_unique<OneCycleSchedule>(*this);
}

void LRRangeTest::describe(OptionKeys& keys, const RunFacts& /*run*/) {
  keys.number({.name = "lr_range_test_min_lr", .meaning = "learning rate at first"},
              lr_range_test_min_lr, kRate);
  keys.integer({.name = "lr_range_test_step_size", .meaning = "steps of one rise"},
               lr_range_test_step_size, kAtLeastOne);
  keys.number(
      {.name = "lr_range_test_step_rate", .meaning = "how much of the first rate each adds"},
      lr_range_test_step_rate, kDecayRate);
  keys.boolean({.name = "lr_range_test_staircase",
                .meaning = "whether it rises at once, and not little by little"},
               lr_range_test_staircase);
}

std::vector<OptionMistake> LRRangeTest::mistakes(double /*base_lr*/) const {
  Checks checks;
  checks.rate("lr_range_test_min_lr", lr_range_test_min_lr);
  checks.count("lr_range_test_step_size", lr_range_test_step_size, 1);
  checks.rate("lr_range_test_step_rate", lr_range_test_step_rate);
  return checks.take();
}

std::unique_ptr<Schedule> LRRangeTest::make(double /*base_lr*/) const {
  return std::make_unique<RangeTestSchedule>(*this);
}

}  // namespace lockstep::optim

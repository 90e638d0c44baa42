#include <lockstep/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <lockstep/base/error.h>

namespace lockstep::optim {

namespace {

// What is wrong with a schedule's options, all of which is told at once.
class Checks {
 public:
  explicit Checks(const char* schedule) : schedule_(schedule) {}

  template <typename... Args>
  void require(bool right, fmt::format_string<Args...> wrong, Args&&... args) {
    if (right) return;
    wrong_ += wrong_.empty() ? fmt::format("{}: ", schedule_) : "; and ";
    wrong_ += fmt::format(wrong, std::forward<Args>(args)...);
  }

  void rate(const char* name, double value) {
    require(std::isfinite(value) && value >= 0, "{} is {}; it must be a number from 0 up", name,
            value);
  }

  void count(const char* name, std::int64_t value, std::int64_t least) {
    require(value >= least, "{} is {}; it must be at least {}", name, value, least);
  }

  void order(const char* low_name, double low, const char* high_name, double high) {
    require(!(low > high), "{} is {}, above {}, which is {}", low_name, low, high_name, high);
  }

  void total(std::int64_t total_num_steps, std::int64_t warmup_num_steps) {
    require(total_num_steps >= 1,
            "total_num_steps is {}; set it to the number of steps of the whole training",
            total_num_steps);
    require(total_num_steps < 1 || warmup_num_steps <= total_num_steps,
            "warmup_num_steps is {}, more than total_num_steps, which is {}: the warm-up would "
            "never end",
            warmup_num_steps, total_num_steps);
  }

  void finish() const {
    if (!wrong_.empty()) throw UsageError("{}", wrong_);
  }

 private:
  const char* schedule_;
  std::string wrong_;
};

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
  WarmupSchedule(const char* name, const WarmupLR& options, double base_lr,
                 std::optional<std::int64_t> total_num_steps)
      : warmup_(options.warmup_num_steps, options.warmup_type),
        min_(options.warmup_min_lr),
        max_(options.warmup_max_lr.value_or(base_lr)),
        total_(total_num_steps) {
    Checks checks(name);
    checks.rate("warmup_min_lr", min_);
    checks.rate("warmup_max_lr", max_);
    checks.order("warmup_min_lr", min_, "warmup_max_lr", max_);
    checks.count("warmup_num_steps", options.warmup_num_steps, 0);
    if (total_) checks.total(*total_, options.warmup_num_steps);
    checks.finish();
  }

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
        base_lr_(base_lr) {
    Checks checks("WarmupCosineLR");
    checks.rate("warmup_min_ratio", options.warmup_min_ratio);
    checks.order("warmup_min_ratio", options.warmup_min_ratio, "the learning rate's ratio", 1);
    checks.rate("cos_min_ratio", options.cos_min_ratio);
    checks.order("cos_min_ratio", options.cos_min_ratio, "the learning rate's ratio", 1);
    checks.count("warmup_num_steps", options.warmup_num_steps, 0);
    checks.total(options.total_num_steps, options.warmup_num_steps);
    checks.finish();
  }

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
                            options.cycle_first_step_size))) {
    Checks checks("OneCycle");
    checks.rate("cycle_min_lr", options.cycle_min_lr);
    checks.rate("cycle_max_lr", options.cycle_max_lr);
    checks.order("cycle_min_lr", options.cycle_min_lr, "cycle_max_lr", options.cycle_max_lr);
    checks.require(options.cycle_max_lr != 0 || options.cycle_min_lr != 0,
                   "cycle_max_lr is 0; set cycle_min_lr and cycle_max_lr");
    checks.rate("decay_lr_rate", options.decay_lr_rate);
    checks.count("cycle_first_step_size", options.cycle_first_step_size, 1);
    if (options.cycle_second_step_size)
      checks.count("cycle_second_step_size", *options.cycle_second_step_size, 1);
    checks.count("decay_step_size", options.decay_step_size, 0);
    checks.require(!(options.decay_lr_rate > 0) || options.decay_step_size != 0,
                   "decay_lr_rate is {}, but decay_step_size is 0, which means no decay: set how "
                   "many steps the rate is for",
                   options.decay_lr_rate);
    checks.finish();
  }

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
  explicit RangeTestSchedule(const LRRangeTest& options) : options_(options) {
    Checks checks("LRRangeTest");
    checks.rate("lr_range_test_min_lr", options.lr_range_test_min_lr);
    checks.count("lr_range_test_step_size", options.lr_range_test_step_size, 1);
    checks.rate("lr_range_test_step_rate", options.lr_range_test_step_rate);
    checks.finish();
  }

 private:
  double at(std::int64_t i) const override {
    double intervals =
        (static_cast<double>(i) + 1) / static_cast<double>(options_.lr_range_test_step_size);
    if (options_.lr_range_test_staircase) intervals = std::floor(intervals);
    return options_.lr_range_test_min_lr * (1 + options_.lr_range_test_step_rate * intervals);
  }

  LRRangeTest options_;
};

struct Maker {
  double base_lr;

  std::unique_ptr<Schedule> operator()(const Constant&) const {
    return std::make_unique<ConstantSchedule>(base_lr);
  }
  std::unique_ptr<Schedule> operator()(const WarmupLR& options) const {
    return std::make_unique<WarmupSchedule>("WarmupLR", options, base_lr, std::nullopt);
  }
  std::unique_ptr<Schedule> operator()(const WarmupDecayLR& options) const {
    return std::make_unique<WarmupSchedule>("WarmupDecayLR",
                                            WarmupLR{.warmup_min_lr = options.warmup_min_lr,
                                                     .warmup_max_lr = options.warmup_max_lr,
                                                     .warmup_num_steps = options.warmup_num_steps,
                                                     .warmup_type = options.warmup_type},
                                            base_lr, options.total_num_steps);
  }
  std::unique_ptr<Schedule> operator()(const WarmupCosineLR& options) const {
    return std::make_unique<CosineSchedule>(options, base_lr);
  }
  std::unique_ptr<Schedule> operator()(const OneCycle& options) const {
    return std::make_unique<OneCycleSchedule>(options);
  }
  std::unique_ptr<Schedule> operator()(const LRRangeTest& options) const {
    return std::make_unique<RangeTestSchedule>(options);
  }
};

}  // namespace

std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr) {
  if (!std::isfinite(base_lr) || base_lr < 0)
    throw UsageError("the optimizer's learning rate is {}; it must be a number from 0 up", base_lr);
  return std::visit(Maker{base_lr}, options);
}

}  // namespace lockstep::optim

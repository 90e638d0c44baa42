#include <lockstep/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <lockstep/base/error.h>

namespace lockstep::optim {

namespace {

void check_rate(const char* schedule, const char* name, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("{}: {} is {}; it must be a number from 0 up", schedule, name, value);
}

void check_count(const char* schedule, const char* name, std::int64_t value, std::int64_t least) {
  if (value < least)
    throw UsageError("{}: {} is {}; it must be at least {}", schedule, name, value, least);
}

void check_order(const char* schedule, const char* low_name, double low, const char* high_name,
                 double high) {
  if (low > high)
    throw UsageError("{}: {} is {}, above {}, which is {}", schedule, low_name, low, high_name,
                     high);
}

void check_total(const char* schedule, std::int64_t total_num_steps,
                 std::int64_t warmup_num_steps) {
  if (total_num_steps < 1)
    throw UsageError("{}: total_num_steps is {}; set it to the number of steps of the whole "
                     "training",
                     schedule, total_num_steps);
  if (warmup_num_steps > total_num_steps)
    throw UsageError("{}: warmup_num_steps is {}, more than total_num_steps, which is {}: the "
                     "warm-up would never end",
                     schedule, warmup_num_steps, total_num_steps);
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
  WarmupSchedule(const char* name, const WarmupLR& options, double base_lr,
                 std::optional<std::int64_t> total_num_steps)
      : warmup_(options.warmup_num_steps, options.warmup_type),
        min_(options.warmup_min_lr),
        max_(options.warmup_max_lr.value_or(base_lr)),
        total_(total_num_steps) {
    check_rate(name, "warmup_min_lr", min_);
    check_rate(name, "warmup_max_lr", max_);
    check_order(name, "warmup_min_lr", min_, "warmup_max_lr", max_);
    check_count(name, "warmup_num_steps", options.warmup_num_steps, 0);
    if (total_) check_total(name, *total_, options.warmup_num_steps);
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
    const char* name = "WarmupCosineLR";
    check_rate(name, "warmup_min_ratio", options.warmup_min_ratio);
    check_order(name, "warmup_min_ratio", options.warmup_min_ratio, "the learning rate's ratio", 1);
    check_rate(name, "cos_min_ratio", options.cos_min_ratio);
    check_order(name, "cos_min_ratio", options.cos_min_ratio, "the learning rate's ratio", 1);
    check_count(name, "warmup_num_steps", options.warmup_num_steps, 0);
    check_total(name, options.total_num_steps, options.warmup_num_steps);
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
    const char* name = "OneCycle";
    check_rate(name, "cycle_min_lr", options.cycle_min_lr);
    check_rate(name, "cycle_max_lr", options.cycle_max_lr);
    check_order(name, "cycle_min_lr", options.cycle_min_lr, "cycle_max_lr", options.cycle_max_lr);
    if (options.cycle_max_lr == 0)
      throw UsageError("{}: cycle_max_lr is 0; set cycle_min_lr and cycle_max_lr", name);
    check_rate(name, "decay_lr_rate", options.decay_lr_rate);
    check_count(name, "cycle_first_step_size", options.cycle_first_step_size, 1);
    if (options.cycle_second_step_size)
      check_count(name, "cycle_second_step_size", *options.cycle_second_step_size, 1);
    check_count(name, "decay_step_size", options.decay_step_size, 0);
    if (options.decay_lr_rate > 0 && options.decay_step_size == 0)
      throw UsageError("{}: decay_lr_rate is {}, but decay_step_size is 0, which means no decay: "
                       "set how many steps the rate is for",
                       name, options.decay_lr_rate);
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
    const char* name = "LRRangeTest";
    check_rate(name, "lr_range_test_min_lr", options.lr_range_test_min_lr);
    check_count(name, "lr_range_test_step_size", options.lr_range_test_step_size, 1);
    check_rate(name, "lr_range_test_step_rate", options.lr_range_test_step_rate);
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

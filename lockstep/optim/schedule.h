// Learning-rate schedules: DeepSpeed's, by its names. Plain numbers: no LibTorch.
//
//   const auto schedule = make_schedule(WarmupLR{.warmup_num_steps = 100}, 3e-4);
//   optimizer->step(schedule->learning_rate(step));
//
// A schedule is a function of the step's number alone, so there is nothing of it to save: a run
// that resumes at step n goes on with the learning rate of step n.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>

namespace lockstep::optim {

// Immutable, thread-safe.
class Schedule {
 public:
  virtual ~Schedule() = default;

  // Of the optimizer's step number `step`, counted from 0 over the steps that were not skipped.
  // UsageError for a negative one.
  virtual double learning_rate(std::int64_t step) const = 0;
};

// How a warm-up rises. DeepSpeed counts i = step - 1, and takes a warm-up of less than 2 steps
// as 2.
enum class WarmupType {
  log,     // ln(i + 1) / ln(warmup_num_steps)
  linear,  // i / warmup_num_steps
};

// The optimizer's own learning rate, throughout.
struct Constant {};

// From warmup_min_lr to warmup_max_lr, and there it stays.
struct WarmupLR {
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;  // the optimizer's own learning rate unless given
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::log;
};

// The same, then in a straight line down to warmup_min_lr at total_num_steps.
struct WarmupDecayLR {
  std::int64_t total_num_steps = 0;  // has no default
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::log;
};

// Ratios of the optimizer's own learning rate: from warmup_min_ratio to 1, then along half a cosine
// to cos_min_ratio at total_num_steps. The first step of all has learning rate 0.
struct WarmupCosineLR {
  std::int64_t total_num_steps = 0;  // has no default
  double warmup_min_ratio = 0;
  std::int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupType warmup_type = WarmupType::log;
};

// From cycle_min_lr to cycle_max_lr and back, once; then cycle_min_lr, decaying where asked to.
struct OneCycle {
  double cycle_min_lr = 0;  // neither has a default
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000;
  std::optional<std::int64_t> cycle_second_step_size;  // as the first unless given
  std::int64_t decay_step_size = 0;                    // 0: no decay
};

// Ever higher, to find out what a model can bear.
struct LRRangeTest {
  double lr_range_test_min_lr = 1e-3;
  std::int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
};

using ScheduleOptions =
    std::variant<Constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest>;

// `base_lr` is the optimizer's own learning rate. UsageError, with the schedule's name and the
// numbers, for options that make no sense.
std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr);

}  // namespace lockstep::optim

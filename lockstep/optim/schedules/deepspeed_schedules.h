// DeepSpeed's schedules, by its names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/optim/options/option_keys.h>

namespace lockstep::optim {

class Schedule;

// The values that a run gives its schedule if the config leaves them out.
struct RunFacts {
  double learning_rate = 0;
  std::int64_t num_steps = 0;  // 0: only the data will tell
};

// How a warm-up rises. DeepSpeed counts i = step - 1, and takes a warm-up of less than 2 steps
// as 2.
enum class WarmupType {
  log,     // ln(i + 1) / ln(warmup_num_steps)
  linear,  // i / warmup_num_steps
};

// The optimizer's own learning rate, throughout.
struct Constant {
  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

// From warmup_min_lr to warmup_max_lr, and there it stays.
struct WarmupLR {
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;  // the optimizer's own learning rate unless given
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::log;

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

// The same, then in a straight line down to warmup_min_lr at total_num_steps.
struct WarmupDecayLR {
  std::int64_t total_num_steps = 0;  // has no default
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::log;

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

// Ratios of the optimizer's own learning rate: from warmup_min_ratio to 1, then along half a cosine
// to cos_min_ratio at total_num_steps. The first step of all has learning rate 0.
struct WarmupCosineLR {
  std::int64_t total_num_steps = 0;  // has no default
  double warmup_min_ratio = 0;
  std::int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupType warmup_type = WarmupType::log;

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

// From cycle_min_lr to cycle_max_lr and back, once; then cycle_min_lr, decaying where asked to.
struct OneCycle {
  double cycle_min_lr = 0;  // neither has a default
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000;
  std::optional<std::int64_t> cycle_second_step_size;  // as the first unless given
  std::int64_t decay_step_size = 0;                    // 0: no decay
  bool cycle_momentum = false;                         // which nothing here does

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

// Ever higher, to find out what a model can bear.
struct LRRangeTest {
  double lr_range_test_min_lr = 1e-3;
  std::int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const;
  std::unique_ptr<Schedule> make(double base_lr) const;
};

}  // namespace lockstep::optim

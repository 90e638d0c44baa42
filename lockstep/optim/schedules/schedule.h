// Learning-rate schedules: DeepSpeed's, by its names. Plain numbers: no LibTorch.
//
//   const auto schedule = make_schedule(WarmupLR{.warmup_num_steps = 100}, 3e-4);
//   optimizer->step(schedule->learning_rate(step));
//
// A schedule is a function of the step's number alone, so there is nothing of it to save: a run
// that resumes at step n goes on with the learning rate of step n.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <lockstep/optim/options/option_keys.h>
#include <lockstep/optim/schedules/deepspeed_schedules.h>

namespace lockstep::optim {

// Immutable, thread-safe.
class Schedule {
 public:
  virtual ~Schedule() = default;

  // The learning rate of the optimizer's step number `step`, counted from 0 over the steps that
  // were not skipped. UsageError for a negative number.
  virtual double learning_rate(std::int64_t step) const = 0;
};

// The options of one schedule: a struct of numbers with
//
//   void describe(OptionKeys& keys, const RunFacts& run);        // each number, once
//   std::vector<OptionMistake> mistakes(double base_lr) const;   // what does not fit together
//   std::unique_ptr<Schedule> make(double base_lr) const;        // where there are none
//
// A member total_num_steps becomes the number of steps of the run where it is 0.
template <typename T>
concept DescribesSchedule = std::copyable<T> &&
    requires(T options, const T& fixed, OptionKeys& keys, const RunFacts& run) {
  options.describe(keys, run);
  { fixed.mistakes(1.0) } -> std::convertible_to<std::vector<OptionMistake>>;
  { fixed.make(1.0) } -> std::convertible_to<std::unique_ptr<Schedule>>;
};

// The options of whichever schedule it is. A value.
class ScheduleOptions {
 public:
  ScheduleOptions() : ScheduleOptions(Constant{}) {}
  template <typename T>
  requires(!std::same_as<T, ScheduleOptions> && DescribesSchedule<T>)
      ScheduleOptions(T options)  // NOLINT(google-explicit-constructor): WarmupLR{} is one
      : options_(std::make_shared<Held<T>>(std::move(options))) {}

  // The type of the struct.
  const std::type_info& type() const { return options_->type(); }
  // Null if it is another struct.
  template <typename T>
  const T* as() const {
    const auto* held = dynamic_cast<const Held<T>*>(options_.get());
    return held == nullptr ? nullptr : &held->options;
  }

  void describe(OptionKeys& keys, const RunFacts& run);
  std::vector<OptionMistake> mistakes(double base_lr) const { return options_->mistakes(base_lr); }
  std::unique_ptr<Schedule> make(double base_lr) const { return options_->make(base_lr); }

  // Fills in the length of the run where it is needed and left out.
  void set_length(std::int64_t num_steps);
  // Steps of the warm-up, and of the whole schedule, where it has both and the latter is known.
  std::optional<std::pair<std::int64_t, std::int64_t>> warmup_and_total() const {
    return options_->warmup_and_total();
  }

 private:
  struct Holder {
    virtual ~Holder() = default;
    virtual std::shared_ptr<Holder> clone() const = 0;
    virtual const std::type_info& type() const = 0;
    virtual void describe(OptionKeys& keys, const RunFacts& run) = 0;
    virtual std::vector<OptionMistake> mistakes(double base_lr) const = 0;
    virtual std::unique_ptr<Schedule> make(double base_lr) const = 0;
    virtual void set_length(std::int64_t num_steps) = 0;
    virtual std::optional<std::pair<std::int64_t, std::int64_t>> warmup_and_total() const = 0;
  };

  template <typename T>
  struct Held final : Holder {
    explicit Held(T given) : options(std::move(given)) {}

    std::shared_ptr<Holder> clone() const override { return std::make_shared<Held>(options); }
    const std::type_info& type() const override { return typeid(T); }
    void describe(OptionKeys& keys, const RunFacts& run) override { options.describe(keys, run); }
    std::vector<OptionMistake> mistakes(double base_lr) const override {
      return options.mistakes(base_lr);
    }
    std::unique_ptr<Schedule> make(double base_lr) const override { return options.make(base_lr); }
    void set_length([[maybe_unused]] std::int64_t num_steps) override {
      if constexpr (requires { options.total_num_steps; })
        if (options.total_num_steps == 0) options.total_num_steps = num_steps;
    }
    std::optional<std::pair<std::int64_t, std::int64_t>> warmup_and_total() const override {
      if constexpr (requires { options.total_num_steps + options.warmup_num_steps; })
        if (options.total_num_steps > 0)
          return std::pair(options.warmup_num_steps, options.total_num_steps);
      return {};
    }

    T options;
  };

  std::shared_ptr<Holder> options_;  // shared by copies until one of them is changed
};

struct ScheduleType {
  std::string name;         // what configs call it; capitals do not matter
  ScheduleOptions options;  // which a config changes
};

// Our own types, followed by the registered ones. Threading: any thread.
std::vector<ScheduleType> schedule_types();

// The name that a struct of options stands under; its C++ name where it has none.
std::string name_of(const ScheduleOptions& options);

// Adds a schedule of a program's own for as long as the process runs; configs name it in
// "scheduler": {"type": …, "params": {…}}. Call it before a config is read. UsageError where the
// name is taken.
void register_schedule(std::string name, ScheduleOptions defaults);

// `base_lr` is the optimizer's own learning rate. UsageError, with the schedule's name and the
// numbers, for options that make no sense.
std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr);

}  // namespace lockstep::optim

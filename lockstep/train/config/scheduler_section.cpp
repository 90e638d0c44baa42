#include <algorithm>

#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

using optim::ScheduleOptions;

constexpr JsonSection::Range kRate = {.lowest = 0, .highest = 1000};
constexpr JsonSection::Range kRatio = {.lowest = 0, .highest = 1};

enum class SchedulerType { constant, warmup, warmup_decay, warmup_cosine, one_cycle, range_test };

constexpr Named<SchedulerType> kSchedulers[] = {{"WarmupLR", SchedulerType::warmup},
                                                {"WarmupDecayLR", SchedulerType::warmup_decay},
                                                {"WarmupCosineLR", SchedulerType::warmup_cosine},
                                                {"OneCycle", SchedulerType::one_cycle},
                                                {"LRRangeTest", SchedulerType::range_test},
                                                {"Constant", SchedulerType::constant}};

class SchedulerReader {
 public:
  SchedulerReader(JsonSection& params, const TrainConfig& config)
      : params_(params), config_(config) {}

  ScheduleOptions read(SchedulerType type) {
    switch (type) {
      case SchedulerType::constant: return optim::Constant{};
      case SchedulerType::warmup: return warmup();
      case SchedulerType::warmup_decay: return warmup_decay();
      case SchedulerType::warmup_cosine: return warmup_cosine();
      case SchedulerType::one_cycle: return one_cycle();
      case SchedulerType::range_test: return range_test();
    }
    return optim::Constant{};
  }

 private:
  void steps(std::string_view key, std::int64_t& value, std::int64_t lowest) {
    params_.integer(key, value, lowest, kMostSteps);
  }

  template <typename Options>
  void rise(Options& options) {
    params_.number("warmup_min_lr", options.warmup_min_lr, kRate);
    double most = config_.optimizer.lr;
    params_.number("warmup_max_lr", most, kRate);
    options.warmup_max_lr = most;
    rise_in_steps(options);
  }

  template <typename Options>
  void rise_in_steps(Options& options) {
    steps("warmup_num_steps", options.warmup_num_steps, 0);
    params_.choice("warmup_type", options.warmup_type, kWarmups);
  }

  void total(std::int64_t& value) {
    value = config_.max_steps.value_or(0);
    steps("total_num_steps", value, 1);
  }

  ScheduleOptions warmup() {
    optim::WarmupLR options;
    rise(options);
    return options;
  }

  ScheduleOptions warmup_decay() {
    optim::WarmupDecayLR options;
    total(options.total_num_steps);
    rise(options);
    return options;
  }

  ScheduleOptions warmup_cosine() {
    optim::WarmupCosineLR options;
    total(options.total_num_steps);
    rise_in_steps(options);
    params_.number("warmup_min_ratio", options.warmup_min_ratio, kRatio);
    params_.number("cos_min_ratio", options.cos_min_ratio, kRatio);
    return options;
  }

  ScheduleOptions one_cycle() {
    optim::OneCycle options;
    if (!params_.number("cycle_min_lr", options.cycle_min_lr, kRate))
      params_.missing("cycle_min_lr", "the learning rate that the cycle starts from");
    if (!params_.number("cycle_max_lr", options.cycle_max_lr, kRate))
      params_.missing("cycle_max_lr", "the learning rate in the middle of the cycle");
    steps("cycle_first_step_size", options.cycle_first_step_size, 1);
    std::int64_t second = options.cycle_first_step_size;
    steps("cycle_second_step_size", second, 1);
    options.cycle_second_step_size = second;
    params_.number("decay_lr_rate", options.decay_lr_rate, {.lowest = 0, .highest = 1e6});
    steps("decay_step_size", options.decay_step_size, 0);
    bool cycle_momentum = false;
    if (params_.boolean("cycle_momentum", cycle_momentum) && cycle_momentum)
      params_.mistake("cycle_momentum", "is true: Lockstep cycles the learning rate only; set it "
                                        "to false");
    return options;
  }

  ScheduleOptions range_test() {
    optim::LRRangeTest options;
    params_.number("lr_range_test_min_lr", options.lr_range_test_min_lr, kRate);
    steps("lr_range_test_step_size", options.lr_range_test_step_size, 1);
    params_.number("lr_range_test_step_rate", options.lr_range_test_step_rate,
                   {.lowest = 0, .highest = 1e6});
    params_.boolean("lr_range_test_staircase", options.lr_range_test_staircase);
    return options;
  }

  JsonSection& params_;
  const TrainConfig& config_;
};

// What is wrong by itself, or what only the data will tell, in place of which a value stands that
// the others fit.
ScheduleOptions with_what_fits(ScheduleOptions options, JsonSection& params, bool lr_is_sound) {
  std::visit(
      [&](auto& one) {
        if constexpr (requires { one.total_num_steps; })
          if (one.total_num_steps == 0 || !params.sound({"total_num_steps"}))
            one.total_num_steps = kMostSteps;
        if constexpr (requires { one.warmup_num_steps; })
          if (!params.sound({"warmup_num_steps"})) one.warmup_num_steps = 0;
        if constexpr (requires { one.warmup_max_lr; })
          if (!params.sound({"warmup_max_lr"}) ||
              (!lr_is_sound && params.find("warmup_max_lr") == nullptr))
            one.warmup_max_lr = kRate.highest;
        if constexpr (requires { one.cycle_max_lr; }) {
          if (!params.sound({"cycle_max_lr"})) one.cycle_max_lr = kRate.highest;
          if (!params.sound({"decay_step_size"})) one.decay_step_size = 1;
        }
      },
      options);
  return options;
}

// DeepSpeed's default is longer than many a run; who has not set it has to hear which key it is.
std::string default_warmup_too_long(JsonSection& params, const TrainConfig& config) {
  if (params.find("warmup_num_steps") != nullptr || !params.sound({"total_num_steps"})) return "";
  return std::visit(
      [](const auto& options) -> std::string {
        if constexpr (requires { options.total_num_steps + options.warmup_num_steps; })
          if (options.total_num_steps > 0 && options.warmup_num_steps > options.total_num_steps)
            return fmt::format("is left out, and its default, {}, is more than all {} "
                               "steps (total_num_steps, or else max_steps): set it, for example "
                               "to {}",
                               options.warmup_num_steps, options.total_num_steps,
                               std::max<std::int64_t>(1, options.total_num_steps / 10));
        return "";
      },
      config.scheduler);
}

}  // namespace

void read_scheduler(JsonSection& top, TrainConfig& config) {
  JsonSection section = top.section("scheduler");
  if (!section.present()) return;
  auto type = SchedulerType::constant;
  JsonSection params = section.section("params");
  if (!section.choice("type", type, kSchedulers)) {
    section.missing("type", "one of DeepSpeed's schedules, for example \"WarmupCosineLR\"");
    params.allow_anything();
    return;
  }
  params.call(name_of(type, kSchedulers));
  config.scheduler = SchedulerReader(params, config).read(type);
  if (const std::string wrong = default_warmup_too_long(params, config); !wrong.empty())
    section.mistake("params.warmup_num_steps", wrong);
  try {
    const bool lr_is_sound = top.sound({"optimizer.params.lr"});
    optim::make_schedule(with_what_fits(config.scheduler, params, lr_is_sound),
                         config.optimizer.lr);
  } catch (const UsageError& error) {
    section.mistake("params", fmt::format("do not fit together: {}", error.what()));
  }
}

}  // namespace lockstep::train

#include <lockstep/optim/schedules/schedule.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <mutex>

#include <lockstep/base/error.h>
#include <lockstep/optim/schedules/deepspeed_schedules.h>

namespace lockstep::optim {

namespace {

// Every schedule: what configs call it, and the options that it has unless others are given. A new
// one is a struct of options that looks like its siblings, and a row here.
std::vector<ScheduleType> own_types() {
  return {{"WarmupLR", WarmupLR{}},
          {"WarmupDecayLR", WarmupDecayLR{}},
          {"WarmupCosineLR", WarmupCosineLR{}},
          {"OneCycle", OneCycle{}},
          {"LRRangeTest", LRRangeTest{}},
          {"Constant", Constant{}}};
}

struct Registry {
  std::mutex mutex;
  std::vector<ScheduleType> types;
};

Registry& registry() {
  static Registry all{.mutex = {}, .types = own_types()};
  return all;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

void ScheduleOptions::describe(OptionKeys& keys, const RunFacts& run) {
  options_ = options_->clone();
  options_->describe(keys, run);
}

void ScheduleOptions::set_length(std::int64_t num_steps) {
  options_ = options_->clone();
  options_->set_length(num_steps);
}

std::vector<ScheduleType> schedule_types() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.types;
}

std::string name_of(const ScheduleOptions& options) {
  for (const ScheduleType& type : schedule_types())
    if (type.options.type() == options.type()) return type.name;
  return options.type().name();
}

void register_schedule(std::string name, ScheduleOptions defaults) {
  if (name.empty())
    throw UsageError("a schedule is registered without a name: give what configs call it");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const ScheduleType& other : all.types)
    if (lower(name) == lower(other.name))
      throw UsageError("a schedule is registered as '{}', which another one is called already: "
                       "choose another name",
                       name);
  all.types.push_back({std::move(name), std::move(defaults)});
}

std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr) {
  if (!std::isfinite(base_lr) || base_lr < 0)
    throw UsageError("the optimizer's learning rate is {}; it must be a number from 0 up", base_lr);
  std::string wrong;
  for (const OptionMistake& mistake : options.mistakes(base_lr))
    wrong += fmt::format("{}{} {}", wrong.empty() ? "" : "; and ", mistake.key, mistake.what);
  if (!wrong.empty()) throw UsageError("{}: {}", name_of(options), wrong);
  return options.make(base_lr);
}

}  // namespace lockstep::optim

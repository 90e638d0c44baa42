#include <lockstep/base/log.h>

#include <memory>
#include <mutex>
#include <optional>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::log {

namespace {

using Logger = std::shared_ptr<spdlog::logger>;

// Nothing where LOCKSTEP_LOG names no level.
std::optional<spdlog::level::level_enum> level_or(spdlog::level::level_enum otherwise) {
  const auto wanted = environment_variable("LOCKSTEP_LOG");
  if (!wanted) return otherwise;
  const auto level = spdlog::level::from_str(*wanted);
  // from_str answers "off" for a name that it does not know, which would silence the log.
  if (level == spdlog::level::off && *wanted != "off") return std::nullopt;
  return level;
}

spdlog::level::level_enum checked_level_or(spdlog::level::level_enum otherwise) {
  const auto level = level_or(otherwise);
  if (!level)
    throw UsageError("environment variable LOCKSTEP_LOG is '{}': it must be trace, debug, info, "
                     "warn, error or off",
                     environment_variable("LOCKSTEP_LOG").value_or(""));
  return *level;
}

Logger make_logger(const std::string& prefix, spdlog::level::level_enum level) {
  auto logger = std::make_shared<spdlog::logger>(
      prefix, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern(prefix.empty() ? "%^%L%$ %H:%M:%S.%e %v"
                                     : "%^%L%$ %H:%M:%S.%e [" + prefix + "] %v");
  logger->set_level(level);
  logger->flush_on(spdlog::level::trace);
  return logger;
}

// Our own logger, not spdlog's default one: that belongs to the program we are a part of.
class Current {
 public:
  Logger logger() {
    const std::lock_guard lock(mutex_);
    return logger_;
  }
  void replace(Logger logger) {
    const std::lock_guard lock(mutex_);
    logger_ = std::move(logger);
  }

 private:
  std::mutex mutex_;
  // A line may come from anywhere, so nothing is thrown here; set_rank and set_name do.
  Logger logger_ = make_logger("", level_or(spdlog::level::info).value_or(spdlog::level::info));
};

Current& current() {
  static Current instance;
  return instance;
}

spdlog::level::level_enum translate(Level level) {
  switch (level) {
    case Level::trace: return spdlog::level::trace;
    case Level::debug: return spdlog::level::debug;
    case Level::info: return spdlog::level::info;
    case Level::warn: return spdlog::level::warn;
    case Level::error: return spdlog::level::err;
  }
  return spdlog::level::err;
}

}  // namespace

bool internal::enabled(Level level) noexcept {
  try {
    return current().logger()->should_log(translate(level));
  } catch (...) {
    return false;
  }
}

void internal::write(Level level, std::string_view text) noexcept {
  try {
    current().logger()->log(translate(level), text);
  } catch (...) {  // nobody is left to be told
  }
}

void set_rank(int rank, int world_size) {
  const auto width = std::to_string(world_size > 0 ? world_size - 1 : 0).size();
  const auto level = checked_level_or(rank == 0 ? spdlog::level::info : spdlog::level::warn);
  current().replace(make_logger(fmt::format("rank {:>{}}", rank, width), level));
}

void set_name(const std::string& name) {
  current().replace(make_logger(name, checked_level_or(spdlog::level::info)));
}

}  // namespace lockstep::log

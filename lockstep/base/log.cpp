#include <lockstep/base/log.h>

#include <string>

#include <spdlog/cfg/helpers.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <lockstep/base/environment.h>

namespace lockstep::log {

namespace {

void install(const std::string& prefix, spdlog::level::level_enum level) {
  auto logger = std::make_shared<spdlog::logger>(
      prefix, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern(prefix.empty() ? "%^%L%$ %H:%M:%S.%e %v"
                                     : "%^%L%$ %H:%M:%S.%e [" + prefix + "] %v");
  const auto wanted = environment_variable("LOCKSTEP_LOG");
  logger->set_level(wanted ? spdlog::level::from_str(*wanted) : level);
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace

void set_rank(int rank, int world_size) {
  const auto width = std::to_string(world_size > 0 ? world_size - 1 : 0).size();
  install(fmt::format("rank {:>{}}", rank, width),
          rank == 0 ? spdlog::level::info : spdlog::level::warn);
}

void set_name(const std::string& name) { install(name, spdlog::level::info); }

}  // namespace lockstep::log

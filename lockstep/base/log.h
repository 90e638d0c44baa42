// Log lines on standard error, with the rank in the prefix. Rank 0 speaks at info, the others from
// warning on, so that a thousand ranks do not say the same thing a thousand times.
//
//   log::warn("{} of {} ranks are here", here, all);
//
// The level can be set for all ranks with LOCKSTEP_LOG (trace, debug, info, warn, error, off).
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <spdlog/fmt/fmt.h>

namespace lockstep::log {

enum class Level { trace, debug, info, warn, error };

namespace internal {
bool enabled(Level level) noexcept;
void write(Level level, std::string_view text) noexcept;

// A level that is called like a function, with a format and its arguments or with a plain text.
struct Speaker {
  Level level;

  // A line for which there is no memory is lost; the caller goes on.
  template <typename... Args>
  void operator()(fmt::format_string<Args...> format, Args&&... args) const noexcept {
    if (!enabled(level)) return;
    try {
      write(level, fmt::format(format, std::forward<Args>(args)...));
    } catch (...) {
      write(level, "(a line that could not be formatted)");
    }
  }
  void operator()(std::string_view text) const noexcept {
    if (enabled(level)) write(level, text);
  }
};
}  // namespace internal

inline constexpr internal::Speaker trace{Level::trace};
inline constexpr internal::Speaker debug{Level::debug};
inline constexpr internal::Speaker info{Level::info};
inline constexpr internal::Speaker warn{Level::warn};
inline constexpr internal::Speaker error{Level::error};

// Called once the process knows who it is; before that, lines carry no rank. Thread-safe.
// UsageError where LOCKSTEP_LOG names no level.
void set_rank(int rank, int world_size);

// Puts `name` in the prefix of lines, for programs that are no rank (the launcher, `lockstep
// check`).
void set_name(const std::string& name);

}  // namespace lockstep::log

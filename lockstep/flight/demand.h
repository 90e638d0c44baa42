// A word to every process of a job on this host: write down where you are. It is a file in the
// directory of the dumps, so that whoever may read them may ask for them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep::flight {

struct Demand {
  enum class Why : std::uint8_t {
    asked,   // somebody wants to know
    failed,  // a group has failed on some rank
  };
  Why why = Why::asked;
  std::uint32_t generation = 0;  // of the group that failed
  std::int64_t round = 0;        // when, in wall-clock nanoseconds of the host; dumps repeat it
};

// Makes the demand and returns its round. For error paths as well: 0 where it could not be written.
// Processes answer within a quarter of a second, those that are stopped or gone never.
std::int64_t demand_dumps(const std::filesystem::path& directory,
                          Demand::Why why = Demand::Why::asked,
                          std::uint32_t generation = 0) noexcept;

// The newest demand; nothing where there is none, or what is there is none.
std::optional<Demand> current_demand(const std::filesystem::path& directory);

// Wall-clock nanoseconds.
std::int64_t wall_clock_ns();

// Whether a dump as of `then` is from before the demand `now`, and not just from the failure that
// led to it: its process has not answered.
bool is_old(std::int64_t then, std::int64_t now);

// The file's name in its directory.
inline constexpr const char* kDemandFile = "demand";

}  // namespace lockstep::flight

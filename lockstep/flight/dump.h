// Dumps: what a recorder held at one moment, as a file, one for each group and rank. A demand, a
// file in the same directory, asks all processes of a job on this host for their dumps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/flight/recorder.h>

namespace lockstep::flight {

// Where a rank's program last said that it is.
struct Progress {
  std::uint64_t step = 0;
  std::string phase;  // "forward"; may be empty
  std::int64_t noted_ns = 0;
};

// Why a dump is written.
struct Cause {
  std::string reason;         // for a person
  std::string fault;          // fault_name() of the error that ended a group; empty: none did
  std::vector<int> at_fault;  // the job's ranks that it names
};

struct Dump {
  std::string host;
  std::int64_t pid = 0;
  std::string group;
  std::uint32_t generation = 0;
  int rank = 0;              // in the group
  std::vector<int> members;  // global ranks, in the group's order
  Cause cause;
  std::string wall_clock;   // when, "2026-03-01T12:00:00.000Z": for people, never compared
  std::int64_t now_ns = 0;  // when, on the clock of the entries' times
  std::uint64_t last_sequence = 0;
  // When it was taken, in wall-clock nanoseconds, or the round of the demand that it answers, if
  // that is later: the demand may come from a host with another clock.
  std::int64_t as_of_ns = 0;
  std::optional<Progress> progress;
  std::vector<Entry> entries;  // oldest first

  int global_rank() const { return members[static_cast<std::size_t>(rank)]; }
};

Dump take_dump(const Recorder& recorder, const Cause& cause);

// "flight-world-1f00c3a2.rank3.json": the same for each dump of one group by one process's rank, so
// that a later one replaces an earlier one.
std::string dump_file_name(const Dump& dump);

// Writes the dump under a temporary name and renames it, so that no reader sees half of one; makes
// the directory where it is missing. For error paths: never throws; where it cannot write it logs
// a warning and returns false.
bool write_dump(const Dump& dump, const std::filesystem::path& directory) noexcept;
// The same for the calls that a recorder holds now.
bool write_dump(const Recorder& recorder, const std::filesystem::path& directory,
                const Cause& cause) noexcept;

// A dump as it stands in its file.
std::string to_text(const Dump& dump);

// UsageError that names the file and the place in it where it is no dump, or an unreasonable one.
Dump read_dump(const std::filesystem::path& path);
// The same for a text; `path` is where it comes from, for messages.
Dump parse_dump(std::string_view text, const std::filesystem::path& path);

// Every finished dump in a directory, by name; none where the directory is missing.
std::vector<std::filesystem::path> list_dumps(const std::filesystem::path& directory);

// Asks every process of a job on this host for its dumps. It is a file in the directory of the
// dumps: who may write there may ask.
struct Demand {
  enum class Why : std::uint8_t {
    asked,   // somebody wants to know
    failed,  // a group has failed on some rank
  };
  Why why = Why::asked;
  std::uint32_t generation = 0;  // of the group that failed
  std::int64_t round = 0;        // when, in wall-clock nanoseconds of the host; dumps repeat it
};

// Makes the demand and returns its round; 0 where it could not be written. Never throws, so that
// error paths may call it. Processes answer within a quarter of a second, but never once they are
// stopped or gone.
std::int64_t demand_dumps(const std::filesystem::path& directory,
                          Demand::Why why = Demand::Why::asked,
                          std::uint32_t generation = 0) noexcept;

// The newest demand; nothing where there is none, or the file holds something else.
std::optional<Demand> current_demand(const std::filesystem::path& directory);

// Wall-clock nanoseconds.
std::int64_t wall_clock_ns();

// Whether a dump as of `then` is from before the demand `now`, and not just from the failure that
// led to it: its process has not answered.
bool is_old(std::int64_t then, std::int64_t now);

// The file's name in its directory.
inline constexpr const char* kDemandFile = "demand";

}  // namespace lockstep::flight

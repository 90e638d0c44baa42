// Where the ranks of this host leave dumps of their flight recorders.
#pragma once

#include <string>

#include <lockstep/net/fd.h>

namespace lockstep::launch {

// The folder that the user named (LOCKSTEP_FLIGHT_DIR), or one in the temporary directory, which is
// removed at the end unless a rank left a dump in it. Each new job removes all such folders but the
// newest kKept, as far as they are this user's and no running job's. Dumps of different generations
// are kept apart.
class FlightDirectory {
 public:
  static constexpr std::size_t kKept = 4;

  // UsageError where the folder cannot be made.
  FlightDirectory();
  ~FlightDirectory();
  FlightDirectory(const FlightDirectory&) = delete;
  FlightDirectory& operator=(const FlightDirectory&) = delete;

  // Chooses the path for the ranks of this generation: the folder, or one within it where there are
  // dumps already.
  void begin(int generation);

  const std::string& path() const { return path_; }

  // Whether a dump tells of a failed call, in a folder that the user does not know of.
  bool tells_of_failures() const;
  // Removes dumps that ranks wrote because somebody asked, when the job has gone well.
  void clear() const;

  // The folder to remove at the end; empty where it is the user's own.
  std::string removable() const { return temporary_ ? root_ : ""; }

 private:
  std::string root_;
  std::string path_;
  bool temporary_ = false;
  net::Fd in_use_;  // locked for as long as this process or its guardian runs
};

// Removes a folder unless there is a dump in it or in a folder in it.
void remove_without_dumps(const std::string& directory);

}  // namespace lockstep::launch

// Where the ranks of this host leave dumps of their flight recorders.
#pragma once

#include <string>

#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// Where the user said (LOCKSTEP_FLIGHT_DIR), or a folder of the temporary directory, which is
// removed at the end where nobody left a dump in it. Of those that stay, each new job removes all
// but the newest kKept, as far as they are this user's and no running job's. What ranks of one
// generation leave is not mixed with what those of the next do.
class FlightDirectory {
 public:
  static constexpr std::size_t kKept = 4;

  // UsageError where the folder cannot be made.
  FlightDirectory();
  ~FlightDirectory();
  FlightDirectory(const FlightDirectory&) = delete;
  FlightDirectory& operator=(const FlightDirectory&) = delete;

  // For the ranks that come next: the folder, or one within it where there are dumps already.
  void begin(int generation);

  const std::string& path() const { return path_; }

  // Whether a rank has left word of a call that failed, where only we know of the folder.
  bool tells_of_failures() const;
  // What ranks wrote because somebody asked served its purpose when the job has gone well.
  void clear() const;

  // What to remove at the end; empty where it is the user's own.
  std::string removable() const { return temporary_ ? root_ : ""; }

 private:
  std::string root_;
  std::string path_;
  bool temporary_ = false;
  net::Fd in_use_;  // locked for as long as this process, or its guardian, is there
};

// Removes a folder where there is no dump in it or in a folder in it.
void remove_without_dumps(const std::string& directory);

}  // namespace lockstep::elastic

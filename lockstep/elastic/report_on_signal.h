// Where the ranks of this host are, printed while the job goes on: kill -USR1 of the launcher.
#pragma once

#include <filesystem>
#include <thread>

namespace lockstep::elastic {

// Keeps SIGUSR1 from this thread, and from all that it starts later, for a thread of its own: at
// each, that asks the ranks for dumps and prints the merged report to standard error. Ranks do not
// get the signal: what they do with it stays their own.
class ReportOnSignal {
 public:
  // `directory` is where ranks leave dumps.
  explicit ReportOnSignal(std::filesystem::path directory);
  ~ReportOnSignal();

 private:
  std::jthread thread_;
};

}  // namespace lockstep::elastic

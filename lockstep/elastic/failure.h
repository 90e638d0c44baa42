// Why a job ended before its time: what launchers tell each other, the user and the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/base/launcher_line.h>

namespace lockstep::elastic {

struct Failure {
  enum class Kind {
    exit,         // a rank ended with an exit code other than 0
    signal,       // a rank was ended by a signal
    spawn,        // a rank could not be started
    node_lost,    // a host's launcher died or cannot be reached
    interrupted,  // a launcher was told to end by a signal
    too_few,      // of the nodes that the job needs to be formed anew
    stopped,      // a rank does not run, by SIGSTOP or a terminal
    stuck,        // a rank reports no progress any more
  };
  enum class Aftermath { ended, restarted };  // of the job

  Kind kind = Kind::exit;
  int rank = -1;  // -1 where it concerns a whole host
  int local_rank = -1;
  int node_rank = 0;
  std::string host;
  int pid = 0;
  int exit_code = 1;  // of the whole job: the rank's own, or 128 + signal
  int signal = 0;
  int generation = 0;      // of the ranks that it happened to
  bool final = false;      // the rank has said that it would only fail so again
  Blame blame;             // whose loss it ended of, as it has said
  std::int64_t step = -1;  // where a stuck rank was last
  // What the system said; how long a rank is stuck; what became of those that are blamed.
  std::string detail;
  std::vector<std::string> last_lines;  // of the rank's output

  // One sentence for a person.
  std::string sentence() const;

  // `lockstep: fault {...}`: one line for a program that watches.
  std::string machine_line(Aftermath aftermath = Aftermath::ended) const;

  // For other launchers, as JSON. decode throws UsageError where the text is no failure.
  std::string encode() const;
  static Failure decode(const std::string& text);

 private:
  std::string because() const;
};

// Of ranks that have ended by themselves, in the order in which that was heard: which one the
// others followed. Whoever blames nobody comes before all that do, and among those the one that
// others blame; a chain of blame is followed to its end. Where that leaves several, the first that
// was heard of.
std::size_t first_of(const std::vector<Failure>& failures);

// Whether whoever watches needs no more words about it: the rank ended with one of these codes,
// before which it says why, or ranks that do so were interrupted.
bool explained(const Failure& failure, const std::vector<int>& exit_codes);

// Whether starting the ranks anew may help: not where a user ended the job, where the program
// cannot be started at all, or where the rank has said that it would only fail so again.
bool worth_a_restart(const Failure& failure);

// "SIGKILL"
std::string signal_name(int signal);

}  // namespace lockstep::elastic

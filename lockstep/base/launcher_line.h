// A rank's line to the launcher that started it: where a process that stays through failures hears
// that its generation is over, and who it is in the next.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep {

// What is said on the line, a packet each. From a rank: `stays` (it goes on in further generations,
// in this process; until then it is ended and started anew as any other), `left` (it has nothing to
// do with the generation any more), `final` (it is about to fail, and would only fail so again) and
// `blames` (a group of its failed because of other ranks: see Blame).
// From the launcher: `leave_soon` (at the end of a step), `leave` (at once), and `place`, with the
// variables of a rank in the next generation.
struct LineMessage {
  enum class Word : char {
    stays = 's',
    left = 'l',
    final = 'f',
    blames = 'b',
    leave_soon = 'S',
    leave = 'L',
    place = 'P',
  };

  Word word = Word::stays;
  std::vector<std::string> variables = {};  // of `place` and `blames`: "NAME=value"

  std::string encode() const;
  // Nothing where the bytes are no such message.
  static std::optional<LineMessage> decode(std::string_view packet);
};

// What a rank knows of its failure: other ranks came first. The launcher names those, whichever
// process it sees end before the others.
struct Blame {
  std::vector<int> ranks;  // the job's numbers; empty: nobody is blamed
  std::string fault;       // fault_name()

  LineMessage message() const;
  // Of a message `blames`.
  static Blame of(const LineMessage& message);
};

// Ownership: the descriptor is the launcher's gift to the process and is left open. Threading: one
// thread hears, any may speak.
class LauncherLine {
 public:
  // Of this process; nothing where no launcher gave it one.
  static std::optional<LauncherLine> inherited();

  // The launcher need not listen.
  void say(const LineMessage& message) const;
  void say(LineMessage::Word word) const { say(LineMessage{.word = word}); }

  // The next message; nothing at the deadline, or when `wake` (a descriptor, or -1) can be read.
  // CommError (peer_lost) where the launcher is gone.
  std::optional<LineMessage> hear(const Deadline& deadline, int wake = -1) const;

 private:
  explicit LauncherLine(int fd) : fd_(fd) {}

  int fd_;
};

// Tells the launcher that a group failed because of these ranks; nothing where this rank is one of
// them, and knows better. The first word counts until `blame_nobody()`. Thread-safe, never throws.
void blame(const std::vector<int>& ranks, const std::string& fault, int own_rank) noexcept;
// For a process that joins its job anew.
void blame_nobody() noexcept;

// Where the launcher started this process to stand by until a rank is lost: waits for that, and
// then the environment is that of the rank whose place it takes. Returns at once for all others.
void await_place_as_spare();

// Waits for the place in the next generation, and puts it into the environment. No other thread may
// read that meanwhile.
void await_place(const LauncherLine& line);

}  // namespace lockstep

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
// do with the generation any more) and `final` (it is about to fail, and would only fail so again).
// From the launcher: `leave_soon` (at the end of a step), `leave` (at once), and `place`, with the
// variables of a rank in the next generation.
struct LineMessage {
  enum class Word : char {
    stays = 's',
    left = 'l',
    final = 'f',
    leave_soon = 'S',
    leave = 'L',
    place = 'P',
  };

  Word word = Word::stays;
  std::vector<std::string> variables = {};  // of `place`: "NAME=value"

  std::string encode() const;
  // Nothing where the bytes are no such message.
  static std::optional<LineMessage> decode(std::string_view packet);
};

// Ownership: the descriptor is the launcher's gift to the process and is left open. Threading: one
// thread hears, any may speak.
class LauncherLine {
 public:
  // Of this process; nothing where no launcher gave it one.
  static std::optional<LauncherLine> inherited();

  // The launcher need not listen.
  void say(LineMessage::Word word) const;

  // The next message; nothing at the deadline, or when `wake` (a descriptor, or -1) can be read.
  // CommError (peer_lost) where the launcher is gone.
  std::optional<LineMessage> hear(const Deadline& deadline, int wake = -1) const;

 private:
  explicit LauncherLine(int fd) : fd_(fd) {}

  int fd_;
};

// Where the launcher started this process to stand by until a rank is lost: waits for that, and
// then the environment is that of the rank whose place it takes. Returns at once for all others.
void await_place_as_spare();

// Waits for the place in the next generation, and puts it into the environment. No other thread may
// read that meanwhile.
void await_place(const LauncherLine& line);

}  // namespace lockstep

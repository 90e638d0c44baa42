// A rank's line to the launcher that started it. A process that stays through failures hears on it
// that its generation is over, and which rank it is in the next.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep {

// One packet on the line.
struct LineMessage {
  enum class Word : char {
    // From a rank:
    stays = 's',   // this process goes on in further generations; without this it is ended and
                   // started again like any other
    left = 'l',    // it has nothing to do with the generation any more
    final = 'f',   // it is about to fail, and would only fail again
    blames = 'b',  // a group of its failed because of other ranks: see Blame
    // From the launcher:
    leave_soon = 'S',  // leave the generation at the end of a step
    leave = 'L',       // leave it at once
    place = 'P',       // the variables of a rank in the next generation
  };

  Word word = Word::stays;
  std::vector<std::string> variables = {};  // "NAME=value", with `place` and `blames`

  std::string encode() const;
  // Nothing where the bytes are no such message.
  static std::optional<LineMessage> decode(std::string_view packet);
};

// Which ranks failed before this one, as far as it knows. The launcher names those, whichever
// process it sees end first.
struct Blame {
  std::vector<int> ranks;  // by their numbers in the job; empty: nobody is blamed
  std::string fault;       // fault_name()

  LineMessage message() const;
  // Reads a message `blames`.
  static Blame of(const LineMessage& message);
};

// This process's end of the line. The launcher gave the descriptor to the process, so it is left
// open. One thread hears, any may speak.
class LauncherLine {
 public:
  // Nothing where no launcher gave this process a line.
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

// Tells the launcher that a group failed because of these ranks. Does nothing where this rank is
// one of them: it knows its own reason. The first call counts until `blame_nobody()`. Thread-safe,
// never throws.
void blame(const std::vector<int>& ranks, const std::string& fault, int own_rank) noexcept;
// Takes the blame back, for a process that joins its job again.
void blame_nobody() noexcept;

// Where the launcher started this process as a spare, waits until a rank is lost, and then has the
// environment of the rank whose place it takes. Returns at once in all other processes.
void await_place_as_spare();

// Waits for the place in the next generation, and puts it into the environment. No other thread may
// read the environment meanwhile.
void await_place(const LauncherLine& line);

}  // namespace lockstep

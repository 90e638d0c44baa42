// The output of many ranks on one terminal: whole lines, each with its rank in front.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// One of the launcher's own streams, written without ever blocking: whoever reads it may be slow
// or stopped, and the launcher must still watch its ranks. Not thread-safe. When it cannot be
// written any more, what follows is dropped, and error() says why.
class Sink {
 public:
  explicit Sink(int fd);

  // Whole lines. They never stand in a line that is not complete yet: on a terminal that one makes
  // room and is shown again below them, elsewhere it is ended.
  void append(std::string_view lines);

  // A number for a stream whose lines come here.
  int add_stream() { return ++num_streams_; }
  // The stream whose line is not complete here; 0: there is no such line.
  int open_line() const { return open_line_; }
  // Begins a line of the stream, or continues it where that is the one that is open.
  void show(int stream, std::string_view part);
  // Completes the line that is open.
  void complete(std::string_view rest);
  // Whether more of it is to be expected: it grew not long ago, and is not without end.
  bool line_goes_on(Clock::time_point now) const;
  // The stream has read so much of it, whether or not that has been shown.
  void line_grew(std::size_t bytes);

  // Writes what the reader takes now.
  void flush();

  int fd() const { return fd_; }
  bool terminal() const { return terminal_; }
  // What the system said when a write failed: EPIPE where nobody reads it any more; 0: nothing yet.
  int error() const { return error_; }
  std::size_t backlog() const { return pending_.size() - written_; }

 private:
  int fd_;
  net::Fd own_;  // the same file opened anew, where its blocking mode is not ours to change
  std::size_t largest_write_;
  bool terminal_ = false;
  int error_ = 0;
  void take(std::string_view text) {
    if (error_ == 0) pending_.append(text);
  }

  std::string pending_;
  std::size_t written_ = 0;
  int num_streams_ = 0;
  int open_line_ = 0;
  std::size_t open_bytes_ = 0;
  Clock::time_point grew_;
  // On a terminal: what stands in the line that is open, and whether it is to be seen now.
  std::string open_text_;
  bool drawn_ = false;
};

// The last lines of one rank's output, in bounded memory.
class Tail {
 public:
  void append(std::string_view text);
  std::vector<std::string> lines(std::size_t most) const;

 private:
  std::string text_;
};

// What stands before each line of a rank, such as "[ 3] ", coloured on a terminal.
std::string line_prefix(int rank, int world_size, bool colour);

// One stream of one rank: reads its pipe and hands on whole lines. Everything but the pipe belongs
// to others and must outlive it. The prefix stands at the beginning of every line, and again where
// a carriage return begins the line anew.
class RankStream {
 public:
  // Whether a line is shown before it is complete, for a person who waits (prompts, progress bars).
  // In a file, lines of several ranks would tear each other apart; a terminal can show them anew.
  enum class Incomplete { shown, held };
  // A line longer than this is handed on in parts, and other ranks' output waits for its end. Where
  // the line stands still for five seconds, or has grown to 64 MiB, their lines come in between.
  static constexpr std::size_t kLongestLine = 1 << 20;

  // `copy` (a file, or -1) also gets the bytes as they come.
  RankStream(net::Fd pipe, std::string prefix, Sink& sink, Incomplete incomplete, Tail* tail,
             net::Fd copy);

  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  // Of the lines from now on.
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  // True where the sink is so far behind that reading more would only fill memory.
  bool held_back() const;
  // True where another stream is in the middle of a long line.
  bool waits_for_line(Clock::time_point now) const;

  // Shows what has come of a line that is not complete, now and then. To be called often.
  void show_incomplete(Clock::time_point now);

  // Reads once. At the end of the stream it completes a partial line and closes the pipe. False
  // where there was nothing to read now.
  bool read();

 private:
  void take(std::string_view bytes);
  void emit(std::string_view line);  // without its newline
  void show();
  bool is_open() const { return sink_->open_line() == id_; }
  std::string with_prefixes(std::string_view text) const;

  net::Fd pipe_;
  std::string prefix_;
  Sink* sink_;
  int id_;  // in the sink
  Incomplete incomplete_;
  Tail* tail_;
  net::Fd copy_;
  // Of the line that is not complete: what it takes to show it anew, and what the sink does not
  // have yet, from `shown_` on.
  std::string partial_;
  std::size_t shown_ = 0;
  std::optional<Clock::time_point> unshown_since_;
};

}  // namespace lockstep::elastic

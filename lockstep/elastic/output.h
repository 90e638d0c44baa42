// The output of many ranks on one terminal: whole lines, each with its rank in front.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// One of the launcher's own streams, written without ever blocking: whoever reads it may be slow
// or stopped, and the launcher must still watch its ranks. Not thread-safe. When it cannot be
// written any more, what follows is dropped, and error() says why.
class Sink {
 public:
  explicit Sink(int fd);

  void append(std::string_view text) {
    if (error_ == 0) pending_.append(text);
  }

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
  std::string pending_;
  std::size_t written_ = 0;
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

// One stream of one rank: reads its pipe, cuts lines and hands them on. Everything but the pipe
// belongs to others and must outlive it.
class RankStream {
 public:
  // A line longer than this is cut: its further pieces are lines of their own.
  static constexpr std::size_t kLongestLine = 1 << 20;

  // `copy` (a file, or -1) also gets the bytes as they come; without `sink` they are not shown.
  RankStream(net::Fd pipe, std::string prefix, Sink* sink, Tail* tail, net::Fd copy);

  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  // Of the lines from now on.
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  // True where the sink is so far behind that reading more would only fill memory.
  bool held_back() const;

  // Reads once. At the end of the stream it completes a partial line and closes the pipe. False
  // where there was nothing to read now.
  bool read();

 private:
  void take(std::string_view bytes);
  void emit(std::string_view line);  // without its newline

  net::Fd pipe_;
  std::string prefix_;
  Sink* sink_;
  Tail* tail_;
  net::Fd copy_;
  std::string partial_;
};

}  // namespace lockstep::elastic

// The output of ranks: pipes to the launcher, which shows whole lines of many ranks on one
// terminal, each with its rank in front; and files (torchrun's --log-dir, --redirects and --tee).
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>

namespace lockstep::launch {

// Which streams of a rank: a set of bits, as torchrun numbers them.
enum class Streams { none = 0, output = 1, error = 2, both = 3 };

// "3" for all ranks, or "0:1,1:2" by local rank.
class StreamChoice {
 public:
  StreamChoice() = default;

  // UsageError that names `flag` where the text is neither, or names a rank that is not one of
  // this host's.
  static StreamChoice parse(const std::string& text, const std::string& flag, int num_ranks);

  bool includes(int local_rank, Streams stream) const;
  bool any() const;

 private:
  Streams all_ = Streams::none;
  std::map<int, Streams> by_rank_;
};

struct StreamChoices {
  StreamChoice redirects;  // to files only
  StreamChoice tee;        // to files as well
};

// A new directory `<base>/<run_id>_<random>`; an empty base means the system's temporary directory.
// UsageError where it cannot be made.
std::filesystem::path make_log_directory(const std::string& base, const std::string& run_id);

// The file that gets one stream of a rank.
struct StreamFile {
  std::filesystem::path path;  // empty: there is none
  bool by_rank = false;        // the rank writes to it by itself, and we read nothing
};

// One stream of one rank: what the rank writes to, and where we read it.
struct Plumbing {
  net::Fd rank_end;
  net::Fd our_end;  // empty where the rank writes to a file by itself
  net::Fd copy;     // a file that gets what we read; may be empty
  StreamFile file;
};

// Makes standard output and error of one rank. `folder` is for their files, and made where there
// are any. UsageError where a file cannot be written or no descriptor is left.
std::array<Plumbing, 2> lay_streams(const std::filesystem::path& folder, int local_rank,
                                    const StreamChoices& choices);

// One of the launcher's own streams. Writing never blocks: its reader may be slow or stopped, and
// the launcher must still watch its ranks. Once the stream cannot be written any more, later output
// is dropped, and error() says why. Not thread-safe.
class Sink {
 public:
  explicit Sink(int fd);

  // Takes whole lines. They never interrupt a line that is not complete yet: on a terminal that
  // line makes room and is shown again below them, elsewhere it is ended.
  void append(std::string_view lines);

  // A number for a stream whose lines come here.
  int add_stream() { return ++num_streams_; }
  // The stream whose line is incomplete here; 0: there is no such line.
  int open_line() const { return open_line_; }
  // Begins a line of the stream, or continues it where it is the open one.
  void show(int stream, std::string_view part);
  // Completes the open line.
  void complete(std::string_view rest);
  // Whether to expect more of the open line: it grew not long ago, and is not endless.
  bool line_goes_on(Clock::time_point now) const;
  // The stream has read so much of the open line, whether or not that has been shown.
  void line_grew(std::size_t bytes);

  // Writes what the reader takes now, or by the deadline.
  void flush();
  void flush(const Deadline& deadline);

  int fd() const { return fd_; }
  bool terminal() const { return terminal_; }
  // The errno of a failed write: EPIPE where nobody reads any more; 0: none has failed.
  int error() const { return error_; }
  std::size_t backlog() const { return pending_.size() - written_; }

 private:
  void take(std::string_view text) {
    if (error_ == 0) pending_.append(text);
  }

  int fd_;
  net::Fd own_;  // the same file opened again, where others share its blocking mode
  std::size_t largest_write_;
  bool terminal_ = false;
  int error_ = 0;
  std::string pending_;
  std::size_t written_ = 0;
  int num_streams_ = 0;
  int open_line_ = 0;
  std::size_t open_bytes_ = 0;
  Clock::time_point grew_;
  // On a terminal: the text of the open line, and whether it can be seen now.
  std::string open_text_;
  bool drawn_ = false;
};

// The last lines of one rank's output, in bounded memory.
class Tail {
 public:
  void append(std::string_view text);
  // The end of a file that a rank writes to by itself; nothing where it cannot be read.
  void append_end_of(const std::filesystem::path& file);
  std::vector<std::string> lines(std::size_t most) const;
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The prefix of each line of a rank, such as "[ 3] ", coloured on a terminal.
std::string line_prefix(int rank, int world_size, bool colour);

// One stream of one rank: reads its pipe and hands on whole lines. Owns only the pipe and the copy;
// the rest must outlive it. The prefix stands at the beginning of every line, and again where a
// carriage return begins the line anew.
class RankStream {
 public:
  // Whether a line is shown before it is complete, for a person who waits (prompts, progress bars).
  // In a file, incomplete lines of several ranks would tear each other apart; a terminal can show
  // them again.
  enum class Incomplete { shown, held };
  // A line longer than this is handed on in parts, and other ranks' output waits for its end. Where
  // the line has not grown for five seconds, or has grown to 64 MiB, their lines come in between.
  static constexpr std::size_t kLongestLine = 1 << 20;

  // `copy` (a file, or -1) also gets the bytes as they come.
  RankStream(net::Fd pipe, std::string prefix, Sink& sink, Incomplete incomplete, Tail* tail,
             net::Fd copy);

  int fd() const { return pipe_.get(); }
  bool open() const { return static_cast<bool>(pipe_); }
  // Sets the prefix of lines from now on.
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  // True where the sink is so far behind that reading more would only fill memory.
  bool held_back() const;
  // True where another stream is in the middle of a long line.
  bool waits_for_line(Clock::time_point now) const;

  // Shows the beginning of an incomplete line from time to time. Call it often.
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
  // The incomplete line, as much of it as it takes to show it again. The sink does not have the
  // part from `shown_` on yet.
  std::string partial_;
  std::size_t shown_ = 0;
  std::optional<Clock::time_point> unshown_since_;
};

}  // namespace lockstep::launch

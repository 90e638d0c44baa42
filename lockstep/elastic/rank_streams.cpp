#include <lockstep/elastic/rank_streams.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

constexpr int kPipeBytes = 1 << 20;  // so that a rank that writes much seldom waits for us

net::Fd open_log(const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  if (failed)
    throw UsageError("cannot make a folder for logs in '{}': {}; check --log-dir",
                     path.parent_path().string(), failed.message());
  net::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!file)
    throw UsageError("cannot write the log file '{}': {}", path.string(), std::strerror(errno));
  return file;
}

Plumbing lay_stream(const fs::path& log, bool redirected, bool teed) {
  Plumbing plumbing;
  if (redirected && !teed) {
    plumbing.rank_end = open_log(log);
    return plumbing;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw UsageError("cannot make a pipe: {}; raise 'ulimit -n' or run fewer ranks",
                     std::strerror(errno));
  plumbing.our_end = net::Fd(ends[0]);
  plumbing.rank_end = net::Fd(ends[1]);
  ::fcntl(ends[0], F_SETPIPE_SZ, kPipeBytes);  // a wish: users have a limit on such memory
  if (teed) plumbing.copy = open_log(log);
  return plumbing;
}

}  // namespace

std::array<Plumbing, 2> lay_streams(const fs::path& folder, int local_rank,
                                    const StreamChoices& choices) {
  constexpr std::array kStreams = {Streams::output, Streams::error};
  constexpr std::array kFiles = {"stdout.log", "stderr.log"};
  std::array<Plumbing, 2> both;
  for (std::size_t i = 0; i < both.size(); ++i)
    both[i] =
        lay_stream(folder / kFiles[i], includes(choices.redirects.of(local_rank), kStreams[i]),
                   includes(choices.tee.of(local_rank), kStreams[i]));
  return both;
}

}  // namespace lockstep::elastic

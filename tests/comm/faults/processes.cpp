#include "processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <sstream>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm::faults {

namespace {

constexpr const char* kOutcome = "outcome ";

// Processes exchange lines, so a newline inside a text must not end it.
std::string on_one_line(std::string text) {
  for (char& letter : text)
    if (letter == '\n') letter = '\t';
  return text;
}
std::string on_many_lines(std::string text) {
  for (char& letter : text)
    if (letter == '\t') letter = '\n';
  return text;
}

std::string read_line(int fd) {
  std::string line;
  char letter = 0;
  while (::read(fd, &letter, 1) == 1 && letter != '\n') line += letter;
  return line;
}

void write_line(int fd, const std::string& line) {
  const std::string whole = on_one_line(line) + "\n";
  [[maybe_unused]] const auto written = ::write(fd, whole.data(), whole.size());
}

std::string text_of(const CommError& error) {
  std::string ranks;
  for (const int rank : error.ranks()) ranks += fmt::format("{},", rank);
  // The test reads it by its own clock, and leaves out no stops.
  const auto now = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch());
  return fmt::format("{}failed {} {} {} {}", kOutcome, static_cast<int>(error.fault()), now.count(),
                     ranks.empty() ? "-" : ranks, error.what());
}

void enter(const std::string& name) {
  const net::Fd space(::open(("/var/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  LOCKSTEP_CHECK(::setns(space.get(), CLONE_NEWNET) == 0, "cannot enter {}", name);
}

// Runs a rank in the child process.
void live(int rank, int n, const std::string& group_id, const JobOptions& options,
          const net::Secret& secret, int in, int out, const std::function<void(Rank&)>& body) {
  const auto at = static_cast<std::size_t>(rank);
  if (!options.namespaces.empty()) enter(options.namespaces[at]);
  const auto endpoint =
      std::make_shared<Endpoint>(options.hosts.empty() ? "127.0.0.1" : options.hosts[at], secret);
  write_line(out, "address " + endpoint->address().encode());
  std::vector<EndpointAddress> addresses;
  for (int peer = 0; peer < n; ++peer)
    addresses.push_back(EndpointAddress::decode(on_many_lines(read_line(in))));
  Rank self(*endpoint,
            connect_group(
                endpoint,
                {.group_id = group_id, .group_name = "test", .rank = rank, .addresses = addresses},
                options.media, Deadline::after(milliseconds(20'000))),
            in, out);
  try {
    body(self);
    write_line(out, std::string(kOutcome) + "fine");
  } catch (const CommError& error) {
    const std::string text = text_of(error);
    self.transport().tell(Notice::from(error, rank));
    write_line(out, text);
    if (options.afterwards == JobOptions::Afterwards::stay) read_line(in);
    ::_exit(1);
  }
}

}  // namespace

void Rank::begin(Fingerprint call, milliseconds timeout) {
  if (call.sequence == 0) call.sequence = ++sequence_;
  transport_->begin(call, Deadline::after(timeout));
}

void Rank::say(const std::string& line) const { write_line(out_, line); }

void Rank::hear(const std::string& word) const {
  while (true) {
    const std::string line = read_line(in_);
    if (line == word) return;
    LOCKSTEP_CHECK(!line.empty(), "the test is gone");
  }
}

Job::Job(int n, const JobOptions& options, const std::function<void(Rank&)>& body)
    : secret_(net::Secret::random()) {
  static int jobs = 0;
  const std::string group_id = fmt::format("job-{}", ++jobs);
  ::signal(SIGPIPE, SIG_IGN);
  for (int rank = 0; rank < n; ++rank) {
    int to_child[2];
    int from_child[2];
    LOCKSTEP_CHECK(::pipe2(to_child, O_CLOEXEC) == 0 && ::pipe2(from_child, O_CLOEXEC) == 0);
    const pid_t pid = ::fork();
    LOCKSTEP_CHECK(pid >= 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(to_child[1]);
      ::close(from_child[0]);
      children_.clear();  // they hold ends of the pipes to earlier ranks
      try {
        live(rank, n, group_id, options, secret_, to_child[0], from_child[1], body);
      } catch (const std::exception& error) {
        write_line(from_child[1], std::string("crash ") + error.what());
        ::_exit(1);
      }
      ::_exit(0);
    }
    ::close(to_child[0]);
    ::close(from_child[1]);
    children_.emplace_back();
    children_.back().pid = pid;
    children_.back().in = net::Fd(to_child[1]);
    children_.back().out = net::Fd(from_child[0]);
  }
  for (Child& from : children_) {
    const std::string word = "address ";
    std::size_t end = 0;
    LOCKSTEP_CHECK(await(
                       from,
                       [&] {
                         const auto begin = from.said.find(word);
                         end = begin == std::string::npos ? begin : from.said.find('\n', begin);
                         return end != std::string::npos;
                       },
                       milliseconds(20'000)),
                   "a rank did not start: {}", from.said);
    const auto begin = from.said.find(word) + word.size();
    from.address = EndpointAddress::decode(on_many_lines(from.said.substr(begin, end - begin)));
  }
  for (int reader = 0; reader < n; ++reader) {
    for (int of = 0; of < n; ++of) {
      EndpointAddress told = address(of);
      if (options.reroute) options.reroute(reader, of, told);
      write_line(child(reader).in.get(), told.encode());
    }
  }
}

Job::~Job() {
  for (Child& one : children_) {
    if (one.pid < 0) continue;
    ::kill(one.pid, SIGKILL);
    ::waitpid(one.pid, nullptr, 0);
  }
}

void Job::read(Child& from, milliseconds longest) {
  pollfd polled{from.out.get(), POLLIN, 0};
  if (from.closed || ::poll(&polled, 1, static_cast<int>(longest.count())) <= 0) return;
  char buffer[4096];
  const ssize_t got = ::read(from.out.get(), buffer, sizeof(buffer));
  if (got <= 0) {
    from.closed = true;
  } else {
    from.said.append(buffer, static_cast<std::size_t>(got));
  }
}

bool Job::await(Child& from, const std::function<bool()>& there, milliseconds longest) {
  const Deadline deadline = Deadline::after(longest);
  while (!there()) {
    if (from.closed || deadline.passed()) return false;
    read(from, milliseconds(100));
  }
  return true;
}

bool Job::says(int rank, const std::string& line, milliseconds longest) {
  Child& from = child(rank);
  return await(
      from, [&] { return ("\n" + from.said).find("\n" + line + "\n") != std::string::npos; },
      longest);
}

void Job::tell(int rank, const std::string& word) { write_line(child(rank).in.get(), word); }

Clock::time_point Job::signal(int rank, int signal) {
  const auto before = Clock::now();
  ::kill(child(rank).pid, signal);
  return before;
}

void Job::stop(int rank) {
  ::kill(child(rank).pid, SIGSTOP);
  int status = 0;
  LOCKSTEP_CHECK(
      ::waitpid(child(rank).pid, &status, WUNTRACED) == child(rank).pid && WIFSTOPPED(status),
      "rank {} has ended: {}", rank, child(rank).said);
}

Outcome Job::outcome(int rank, milliseconds longest) {
  Child& from = child(rank);
  std::size_t begin = 0;
  const bool ended = await(
      from,
      [&] {
        begin = from.said.find(kOutcome);
        return begin != std::string::npos && from.said.find('\n', begin) != std::string::npos;
      },
      longest);
  Outcome outcome;
  outcome.said = from.said;
  if (!ended) {
    outcome.gone = from.closed;
    outcome.text = from.closed ? "the rank is gone" : "the rank did not end in time";
    return outcome;
  }
  std::istringstream line(from.said.substr(begin, from.said.find('\n', begin) - begin));
  std::string word;
  int fault = 0;
  std::int64_t at = 0;
  std::string ranks;
  line >> word >> word;
  outcome.finished = word == "fine";
  outcome.failed = word == "failed";
  if (!outcome.failed) return outcome;
  line >> fault >> at >> ranks;
  std::getline(line, outcome.text);
  outcome.fault = static_cast<Fault>(fault);
  outcome.at = Clock::time_point(Clock::duration(at));
  std::istringstream list(ranks);
  for (std::string one; std::getline(list, one, ',');)
    if (one != "-") outcome.ranks.push_back(std::stoi(one));
  return outcome;
}

}  // namespace lockstep::comm::faults

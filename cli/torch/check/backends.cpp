#include <cli/torch/check/report.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>

#include <ATen/ATen.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/backends/table.h>
#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/world/backends.h>
#include <lockstep/net/fd.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

namespace lockstep::cli::inspection {

namespace {

constexpr milliseconds kTimeout{15'000};

void add_up(comm::Communicator& ranks) {
  at::Tensor numbers = at::full({1 << 18}, ranks.rank() + 1.0);
  ranks.all_reduce(numbers).wait_on_host();
  const double expected = ranks.size() * (ranks.size() + 1) / 2.0;
  if (!numbers.eq(expected).all().item<bool>())
    throw UsageError("it added {} numbers wrongly", numbers.numel());
}

// Two ranks as threads of this process.
template <typename Make>
void try_with_two_ranks(Make make) {
  const auto rank = [&make](int number) {
    comm::GroupInfo group{.name = "check", .rank = number, .global_ranks = {0, 1}};
    add_up(*make(group));
  };
  auto other = std::async(std::launch::async, rank, 1);
  rank(0);
  other.get();
}

// Two ranks where they can be threads of this process. mpirun starts the ranks of some backends,
// and lanes want a GPU for each rank: there, one rank is what can be tried.
void try_backend(const comm::Backend& backend) {
  if (backend.can.makes == comm::backends::Makes::lanes)
    return backend.lanes.try_alone(Deadline::after(kTimeout));
  const net::Secret secret = net::Secret::random();
  const store::Server server({"127.0.0.1", 0}, secret);
  const std::vector<std::shared_ptr<comm::Endpoint>> endpoints = {
      std::make_shared<comm::Endpoint>("127.0.0.1", secret),
      std::make_shared<comm::Endpoint>("127.0.0.1", secret)};
  const auto make = [&](const comm::GroupInfo& group) {
    comm::GroupOptions options{.store = std::make_shared<store::Client>(server.address(), secret,
                                                                        Deadline::after(kTimeout)),
                               .timeout = kTimeout,
                               .endpoint = endpoints[static_cast<std::size_t>(group.rank)],
                               .group_id = "check"};
    for (const int rank : group.global_ranks)
      options.addresses.push_back(endpoints[static_cast<std::size_t>(rank)]->address());
    return backend.make(group, options);
  };
  if (backend.can.started_by == comm::backends::StartedBy::mpirun)
    add_up(*make({.name = "check"}));
  else
    try_with_two_ranks(make);
}

// In the child: what is wrong with the backend, or nothing.
std::string reason_against(const std::string& name) {
  try {
    try_backend(comm::backend_named(name));
    return "";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }
}

struct Child {
  pid_t pid = -1;
  net::Fd answer;  // "works", or the reason why not; the end of it where the child dies
};

Child start(const std::string& name) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw UsageError("no pipe for trying {}: {}", name, std::strerror(errno));
  Child child;
  child.answer = net::Fd(ends[0]);
  const net::Fd write_end(ends[1]);
  child.pid = ::fork();
  if (child.pid < 0) throw UsageError("no process for trying {}: {}", name, std::strerror(errno));
  if (child.pid > 0) return child;

  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The reason already has what libraries print on the way.
  const net::Fd nowhere(::open("/dev/null", O_RDWR | O_CLOEXEC));
  ::dup2(nowhere.get(), STDOUT_FILENO);
  ::dup2(nowhere.get(), STDERR_FILENO);
  const std::string reason = reason_against(name);
  const std::string text = reason.empty() ? "works" : reason;
  (void)!::write(write_end.get(), text.data(), text.size());
  // MPI wants to be left in good order; the others only slow down what is over.
  if (comm::backends::is_started_by_mpirun(name)) std::exit(0);
  ::_exit(0);
}

std::string read_answer(const net::Fd& pipe, Deadline deadline) {
  std::string text;
  char buffer[4096];
  while (!deadline.passed()) {
    pollfd ready{pipe.get(), POLLIN, 0};
    if (::poll(&ready, 1, deadline.poll_timeout()) <= 0) continue;
    const ssize_t count = ::read(pipe.get(), buffer, sizeof buffer);
    if (count <= 0) return text;
    text.append(buffer, static_cast<std::size_t>(count));
    if (text == "works") return text;
  }
  return "did not answer in time";
}

Answer finish(const std::string& name, Child& child, Deadline deadline) {
  const std::string text = read_answer(child.answer, deadline);
  // MPI gets a moment to leave.
  const bool by_mpirun = comm::backends::is_started_by_mpirun(name);
  const Deadline leaving = Deadline::after(milliseconds(by_mpirun ? 2000 : 200));
  int status = 0;
  while (::waitpid(child.pid, &status, WNOHANG) == 0) {
    if (leaving.passed()) {
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, &status, 0);
      break;
    }
    ::usleep(1000);
  }
  if (text == "works") return {true, by_mpirun ? "mpirun starts its ranks" : ""};
  if (!text.empty()) return {false, text};
  return {false, WIFSIGNALED(status) ? fmt::format("ended by signal {} ({})", WTERMSIG(status),
                                                   ::strsignal(WTERMSIG(status)))
                                     : fmt::format("ended with status {}", WEXITSTATUS(status))};
}

}  // namespace

std::vector<Backend> try_backends(Deadline deadline) {
  const auto built = comm::available_backends();
  const bool inside_mpi = read_launch_environment().launcher == Launcher::mpirun;
  std::vector<Backend> backends;
  std::vector<Child> children;
  std::fflush(nullptr);
  for (const comm::backends::Capabilities& row : comm::backends::table()) {
    if (row.joins_two_links()) continue;
    Backend& backend = backends.emplace_back();
    Child& child = children.emplace_back();
    backend.name = row.name;
    backend.built = std::find(built.begin(), built.end(), row.name) != built.end();
    if (!backend.built) {
      backend.works.reason = "it needs " + row.needs_to_build;
    } else if (inside_mpi && row.started_by == comm::backends::StartedBy::mpirun) {
      backend.works = {true, "mpirun has started these ranks"};
    } else {
      child = start(row.name);
    }
  }
  for (std::size_t i = 0; i < backends.size(); ++i)
    if (children[i].pid > 0) backends[i].works = finish(backends[i].name, children[i], deadline);
  return backends;
}

}  // namespace lockstep::cli::inspection

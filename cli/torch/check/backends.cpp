#include <cli/torch/check/backends.h>

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
#include <lockstep/comm/engines/engines.h>
#include <lockstep/comm/transport_communicator.h>
#include <lockstep/comm/world.h>
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

void try_transport(comm::Media media) {
  const net::Secret secret = net::Secret::random();
  const std::vector<std::shared_ptr<comm::Endpoint>> endpoints = {
      std::make_shared<comm::Endpoint>("127.0.0.1", secret),
      std::make_shared<comm::Endpoint>("127.0.0.1", secret)};
  try_with_two_ranks([&](const comm::GroupInfo& group) {
    return comm::make_transport_communicator(
        endpoints[static_cast<std::size_t>(group.rank)], group, "check",
        {endpoints[0]->address(), endpoints[1]->address()}, {.media = media, .timeout = kTimeout});
  });
}

void try_engine(const std::string& name) {
  const net::Secret secret = net::Secret::random();
  const store::Server server({"127.0.0.1", 0}, secret);
  const auto options = [&] {
    return comm::engines::EngineOptions{.store = std::make_shared<store::Client>(
                                            server.address(), secret, Deadline::after(kTimeout)),
                                        .timeout = kTimeout};
  };
  if (name == "gloo") {
    try_with_two_ranks([&](const comm::GroupInfo& group) {
      return comm::engines::make_engine(name, group, options());
    });
    return;
  }
  // mpirun starts MPI's ranks, and NCCL wants a GPU for each: one rank is what can be tried here.
  if (name == "nccl") return comm::engines::try_nccl(Deadline::after(kTimeout));
  add_up(*comm::engines::make_engine(name, {.name = "check"}, options()));
}

// In the child: what is wrong with the backend, or nothing.
std::string reason_against(const std::string& name) {
  try {
    if (name == "shm") {
      try_transport(comm::Media::shared_memory);
    } else if (name == "tcp") {
      try_transport(comm::Media::tcp);
    } else {
      try_engine(name);
    }
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
  // What libraries say on the way is in the reason already.
  const net::Fd nowhere(::open("/dev/null", O_RDWR | O_CLOEXEC));
  ::dup2(nowhere.get(), STDOUT_FILENO);
  ::dup2(nowhere.get(), STDERR_FILENO);
  const std::string reason = reason_against(name);
  const std::string text = reason.empty() ? "works" : reason;
  (void)!::write(write_end.get(), text.data(), text.size());
  // MPI wants to be left in good order; the others only slow down what is over.
  if (name == "mpi") std::exit(0);
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
  const Deadline leaving = Deadline::after(milliseconds(name == "mpi" ? 2000 : 200));
  int status = 0;
  while (::waitpid(child.pid, &status, WNOHANG) == 0) {
    if (leaving.passed()) {
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, &status, 0);
      break;
    }
    ::usleep(1000);
  }
  if (text == "works") return {true, name == "mpi" ? "mpirun starts its ranks" : ""};
  if (!text.empty()) return {false, text};
  return {false, WIFSIGNALED(status) ? fmt::format("ended by signal {} ({})", WTERMSIG(status),
                                                   ::strsignal(WTERMSIG(status)))
                                     : fmt::format("ended with status {}", WEXITSTATUS(status))};
}

// What an engine needs that this build lacks, in the registry's words.
std::string reason_for_absence(const std::string& name) {
  try {
    comm::engines::make_engine(name, {}, {});
  } catch (const UsageError& error) {
    const std::string text = error.what();
    const auto start = text.find("it needs ");
    if (start == std::string::npos) return text;
    return text.substr(start, text.find(": install that") - start);
  }
  return "";
}

}  // namespace

std::vector<Backend> try_backends(Deadline deadline) {
  const auto built = comm::available_backends();
  const bool inside_mpi = read_launch_environment().launcher == Launcher::mpirun;
  std::vector<Backend> backends;
  std::vector<Child> children;
  std::fflush(nullptr);
  for (const char* name : {"shm", "tcp", "gloo", "mpi", "nccl"}) {
    Backend& backend = backends.emplace_back();
    Child& child = children.emplace_back();
    backend.name = name;
    backend.built = std::find(built.begin(), built.end(), name) != built.end();
    if (!backend.built) {
      backend.works.reason = reason_for_absence(name);
    } else if (inside_mpi && backend.name == "mpi") {
      backend.works = {true, "mpirun has started these ranks"};
    } else {
      child = start(name);
    }
  }
  for (std::size_t i = 0; i < backends.size(); ++i)
    if (children[i].pid > 0) backends[i].works = finish(backends[i].name, children[i], deadline);
  return backends;
}

}  // namespace lockstep::cli::inspection

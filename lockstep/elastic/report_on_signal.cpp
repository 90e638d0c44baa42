#include <lockstep/elastic/report_on_signal.h>

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/output.h>
#include <lockstep/flight/report.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

// Those that can answer do so much faster.
constexpr milliseconds kLongestAnswer{3000};

std::string report_now(const std::filesystem::path& directory) {
  try {
    const flight::Evidence evidence = flight::demand_evidence(directory, kLongestAnswer);
    if (evidence.dumps.empty())
      return "lockstep: no rank of this host has made a group that could be asked\n";
    return fmt::format("lockstep: where the ranks of this host are:\n{}",
                       flight::merged_report(evidence));
  } catch (const std::exception& error) {
    return fmt::format("lockstep: {}\n", error.what());
  }
}

void print(const std::string& text) {
  Sink sink(STDERR_FILENO);
  sink.append(text);
  const Deadline deadline = Deadline::after(milliseconds(1000));
  for (sink.flush(); sink.backlog() > 0; sink.flush())
    if (!net::wait_ready(sink.fd(), POLLOUT, deadline)) return;
}

}  // namespace

ReportOnSignal::ReportOnSignal(std::filesystem::path directory) {
  sigset_t asked;
  ::sigemptyset(&asked);
  ::sigaddset(&asked, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &asked, nullptr);
  thread_ = std::jthread([asked, directory = std::move(directory)](const std::stop_token& stop) {
    int signal = 0;
    while (::sigwait(&asked, &signal) == 0 && !stop.stop_requested()) print(report_now(directory));
  });
}

ReportOnSignal::~ReportOnSignal() {
  thread_.request_stop();
  ::pthread_kill(thread_.native_handle(), SIGUSR1);
}

}  // namespace lockstep::elastic

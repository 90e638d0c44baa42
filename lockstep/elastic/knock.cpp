#include <lockstep/elastic/knock.h>

#include <cstring>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/elastic/door.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

// For one attempt at one of several addresses, so that one that is cut off does not hide the
// others.
constexpr milliseconds kOneAttempt(1500);
constexpr milliseconds kPause(50);

[[noreturn]] void turned_away(const std::string& explanation) {
  throw CommError({.fault = Fault::refused,
                   .operation = "meeting of the launchers",
                   .explanation = explanation});
}

std::string list(const std::vector<net::Address>& addresses) {
  std::string text;
  for (const net::Address& address : addresses)
    text += (text.empty() ? "" : " or ") + address.text();
  return text;
}

}  // namespace

Visit visit(const net::Address& address, const Introduction& who, const net::Secret& secret,
            const Deadline& deadline) {
  Visit visit;
  try {
    int error = 0;
    net::Fd socket = net::try_connect_tcp(address, deadline, error);
    if (!socket) {
      visit.reason = std::strerror(error);
      return visit;
    }
    visit.outcome = Visit::Outcome::stranger;
    net::introduce(socket, secret, kLauncherPurpose, deadline);
    visit.channel = Channel(std::move(socket));
  } catch (const CommError& error) {
    if (error.fault() == Fault::refused)
      turned_away(fmt::format("What listens at {} does not know this job's secret: give the same "
                              "--secret-file (or LOCKSTEP_SECRET_FILE) on every host, and check "
                              "that no other job uses that address.",
                              address.text()));
    visit.reason = error.what();
    return visit;
  }
  visit.channel.send("hello", who.encode());
  const auto answer = visit.channel.receive(deadline);
  visit.outcome = Visit::Outcome::not_yet;
  if (!answer) return visit;
  if (answer->word == "refused")
    turned_away(fmt::format("Node 0 at {} says: {}.", address.text(), answer->text));
  if (answer->word == "welcome") {
    visit.outcome = Visit::Outcome::welcome;
    visit.hub = address;
  } else if (answer->word == "elsewhere") {
    visit.outcome = Visit::Outcome::elsewhere;
    visit.hub = net::Address::parse(answer->text, 0, "another launcher's word where node 0 is");
  } else {
    visit.reason = answer->word;
  }
  return visit;
}

Visit find_hub(const std::vector<net::Address>& addresses, const Introduction& who,
               const net::Secret& secret, const Deadline& deadline) {
  std::string last_reason;
  while (true) {
    for (const net::Address& address : addresses) {
      const auto attempt = [&] {
        return Deadline::after(std::min<Clock::duration>(kOneAttempt, deadline.remaining()));
      };
      Visit found = visit(address, who, secret, attempt());
      if (found.outcome == Visit::Outcome::elsewhere)
        found = visit(found.hub, who, secret, attempt());
      if (found.outcome == Visit::Outcome::welcome) return found;
      last_reason = found.outcome == Visit::Outcome::not_yet
                        ? "a launcher is there, but not node 0's"
                        : found.reason;
    }
    if (deadline.passed())
      throw CommError(
          {.fault = Fault::timeout,
           .operation = "meeting of the launchers",
           .explanation = fmt::format(
               "Node 0 did not answer at {} within {:.1f} s: start 'lockstep run' there with the "
               "same --rdzv-endpoint (or --master-addr and --master-port), and check that a "
               "firewall lets it be reached. ({})",
               list(addresses), deadline.span_seconds(), last_reason)});
    std::this_thread::sleep_for(std::min<Clock::duration>(kPause, deadline.remaining()));
  }
}

}  // namespace lockstep::elastic

#include <lockstep/elastic/knock.h>

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

Channel knock_at(const net::Address& address, const Introduction& who, const net::Secret& secret,
                 const Deadline& deadline, net::IfRefused if_refused) {
  net::Fd socket = net::connect_tcp(address, deadline, if_refused);
  net::introduce(socket, secret, kLauncherPurpose, deadline);
  Channel channel(std::move(socket));
  channel.send("hello", who.encode());
  return channel;
}

std::string list(const std::vector<net::Address>& addresses) {
  std::string text;
  for (const net::Address& address : addresses)
    text += (text.empty() ? "" : " or ") + address.text();
  return text;
}

}  // namespace

Knocked knock(const std::vector<net::Address>& addresses, const Introduction& who,
              const net::Secret& secret, const Deadline& deadline) {
  const auto if_refused =
      addresses.size() == 1 ? net::IfRefused::try_again : net::IfRefused::give_up;
  std::string last_reason;
  while (true) {
    for (const net::Address& address : addresses) {
      const auto attempt =
          Deadline::after(std::min<Clock::duration>(kOneAttempt, deadline.remaining()));
      try {
        return {knock_at(address, who, secret, attempt, if_refused), address};
      } catch (const CommError& error) {
        if (error.fault() == Fault::refused)
          throw CommError(
              {.fault = Fault::refused,
               .operation = "meeting of the launchers",
               .explanation = fmt::format(
                   "What listens at {} does not know this job's secret: give the same "
                   "--secret-file (or LOCKSTEP_SECRET_FILE) on every host, and check that no other "
                   "job uses that address.",
                   address.text())});
        last_reason = error.what();
      }
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

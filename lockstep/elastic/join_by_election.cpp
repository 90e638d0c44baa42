#include <lockstep/elastic/join_by_election.h>

#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/door.h>
#include <lockstep/elastic/election.h>
#include <lockstep/elastic/hub.h>
#include <lockstep/elastic/knock.h>
#include <lockstep/elastic/member.h>
#include <lockstep/net/address.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

constexpr milliseconds kVisitOfTheElected(1500);
constexpr milliseconds kBetweenQuestions(20);

// Where the others can reach this host: where etcd is on it, its way there may be one that only
// this host has.
std::string own_host(const MeetingOptions& options) {
  if (!options.local_addr.empty()) {
    try {
      net::listen_tcp({options.local_addr, 0});
      return options.local_addr;
    } catch (const UsageError& error) {  // a name for messages only
      log::debug("{}", error.what());
    }
  }
  std::string host;
  for (const net::Address& member : options.endpoints) {
    host = net::local_host_toward(member);
    if (!host.starts_with("127.") && host != "::1") break;
  }
  return host;
}

[[noreturn]] void nobody_found(const Election& election, const Election::Standing& standing,
                               const std::string& last_reason, const Deadline& deadline) {
  std::string what;
  if (!standing.trouble.empty() || standing.office == Election::Office::unknown) {
    what =
        fmt::format("etcd at {} gave no useful answer within {:.1f} s ({}): start it, or correct "
                    "--rdzv-endpoint.",
                    election.where(), deadline.span_seconds(), standing.trouble);
  } else if (standing.office == Election::Office::others) {
    what = fmt::format("Node 0 did not answer within {:.1f} s at {}, where it is by the key {} in "
                       "etcd ({}): check that a firewall lets it be reached, and that no other "
                       "job has the same --rdzv-id.",
                       deadline.span_seconds(), standing.hub.text(), election.key(), last_reason);
  } else {
    what = fmt::format("Nobody became node 0 within {:.1f} s: start the launcher with --node-rank "
                       "0, or leave --node-rank out on all hosts.",
                       deadline.span_seconds());
  }
  throw CommError(
      {.fault = Fault::timeout, .operation = "meeting of the launchers", .explanation = what});
}

}  // namespace

std::unique_ptr<Peers> join_by_election(const MeetingOptions& options, const net::Secret& secret) {
  const auto door = std::make_shared<Door>(net::Address{own_host(options), 0}, secret);
  door->send_away("nobody", "");
  const auto election =
      std::make_shared<Election>(options.endpoints, options.run_id, door->address());
  election->wish(Election::wish_of_newcomer(options.node_rank));
  const Introduction who = introduce(options, door->address().text());
  const Deadline deadline = Deadline::after(options.timeout);
  std::uint64_t last_look = 0;
  std::string last_reason;
  while (true) {
    const Election::Standing standing = election->standing();
    if (standing.office == Election::Office::ours)
      return std::make_unique<Hub>(options, secret, door, election);
    if (standing.office == Election::Office::others && standing.look != last_look) {
      last_look = standing.look;
      Visit found = visit(standing.hub, who, secret, Deadline::after(kVisitOfTheElected));
      if (found.outcome == Visit::Outcome::welcome)
        return std::make_unique<Member>(options, secret, door, election, std::move(found));
      last_reason = found.outcome == Visit::Outcome::not_yet
                        ? "a launcher is there, but not node 0's"
                        : found.reason;
    }
    if (deadline.passed()) nobody_found(*election, standing, last_reason, deadline);
    std::this_thread::sleep_for(kBetweenQuestions);
  }
}

}  // namespace lockstep::elastic

#include <lockstep/elastic/join_job.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/door.h>
#include <lockstep/elastic/hub.h>
#include <lockstep/elastic/member.h>

namespace lockstep::elastic {

std::unique_ptr<Peers> join_job(const MeetingOptions& options, const net::Secret& secret) {
  const net::Address& endpoint = options.endpoints.front();
  if (options.max_nodes == 1 || options.node_rank == 0)
    return std::make_unique<Hub>(options, secret, std::make_shared<Door>(endpoint, secret));
  if (!options.node_rank) {
    // Whoever can listen at the endpoint is node 0.
    std::shared_ptr<Door> door;
    try {
      door = std::make_shared<Door>(endpoint, secret);
    } catch (const UsageError& error) {
      log::info("joining node 0 at {} ({})", endpoint.text(), error.what());
    }
    if (door) return std::make_unique<Hub>(options, secret, std::move(door));
  }
  return std::make_unique<Member>(options, secret);
}

}  // namespace lockstep::elastic

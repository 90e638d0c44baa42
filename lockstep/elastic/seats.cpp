#include <lockstep/elastic/seats.h>

#include <algorithm>
#include <set>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace {

constexpr int kMostRanksOfAHost = 1 << 16;  // of one host

std::set<int> claimed(const Seats& seats) {
  std::set<int> ranks{0};
  for (const Seat& seat : seats)
    if (seat.who.node_rank >= 0) ranks.insert(seat.who.node_rank);
  return ranks;
}

void fill_fixed_numbers(Seats& seats, int num_nodes) {
  std::set<int> taken;
  for (const Seat& seat : seats)
    if (seat.node_rank >= 0) taken.insert(seat.node_rank);
  for (Seat& seat : seats)
    if (seat.node_rank < 0 && seat.who.node_rank >= 0 && seat.who.node_rank < num_nodes &&
        taken.insert(seat.who.node_rank).second)
      seat.node_rank = seat.who.node_rank;
  int next = 1;
  for (Seat& seat : seats) {
    while (taken.contains(next)) ++next;
    if (seat.node_rank >= 0 || next >= num_nodes) continue;
    seat.node_rank = next;
    taken.insert(next);
  }
}

// A number that nobody has comes after all others.
int place(int number) { return number < 0 ? 1 << 30 : number; }

}  // namespace

std::string objection(const Introduction& who, const MeetingOptions& terms, const Seats& seats,
                      Meeting meeting) {
  if (who.min_nodes != terms.min_nodes || who.max_nodes != terms.max_nodes)
    return fmt::format("this job has --nnodes {}, but host {} was started with --nnodes {}",
                       node_range(terms.min_nodes, terms.max_nodes), who.host,
                       node_range(who.min_nodes, who.max_nodes));
  if (who.run_id != terms.run_id)
    return fmt::format("this job has --rdzv-id '{}', but host {} was started with '{}'",
                       terms.run_id, who.host, who.run_id);
  if (who.num_ranks < 1 || who.num_ranks > kMostRanksOfAHost)
    return fmt::format("host {} wants to run {} ranks", who.host, who.num_ranks);
  // Where nodes may come later, those that are too many wait.
  if (!terms.elastic() && static_cast<int>(seats.size()) >= terms.max_nodes)
    return fmt::format("all {} nodes of this job have come already, without host {}",
                       terms.max_nodes, who.host);
  if (who.node_rank >= terms.max_nodes)
    return fmt::format("--node-rank {} of host {} is not below --nnodes {}", who.node_rank,
                       who.host, terms.max_nodes);
  // Later, it may be a node that comes back before its loss was noticed.
  if (meeting == Meeting::later || terms.min_nodes < terms.max_nodes) return "";
  if (who.node_rank == 0)
    return fmt::format("host {} was started with --node-rank 0, which this host is", who.host);
  for (const Seat& seat : seats)
    if (who.node_rank > 0 && seat.who.node_rank == who.node_rank)
      return fmt::format("hosts {} and {} were both started with --node-rank {}", seat.who.host,
                         who.host, who.node_rank);
  return "";
}

std::string missing_nodes(const Seats& seats, int num_nodes) {
  if (static_cast<int>(seats.size()) >= num_nodes) return "";
  const std::size_t missing = static_cast<std::size_t>(num_nodes) - seats.size();
  const std::set<int> taken = claimed(seats);
  std::vector<int> open;
  for (int node = 1; node < num_nodes; ++node)
    if (!taken.contains(node)) open.push_back(node);
  // Guests that claimed no rank could take any of those that are open.
  if (open.size() == missing) return "node " + list_ranks(open);
  return fmt::format("{} of the node {}", missing, list_ranks(open));
}

void number_seats(Seats& seats, const MeetingOptions& terms) {
  seats.front().node_rank = 0;
  if (terms.min_nodes == terms.max_nodes) fill_fixed_numbers(seats, terms.max_nodes);
  std::stable_sort(seats.begin(), seats.end(), [](const Seat& a, const Seat& b) {
    if (a.node_rank >= 0 || b.node_rank >= 0) return place(a.node_rank) < place(b.node_rank);
    return place(a.who.node_rank) < place(b.who.node_rank);
  });
  for (std::size_t i = 0; i < seats.size(); ++i)
    seats[i].node_rank = static_cast<int>(i) < terms.max_nodes ? static_cast<int>(i) : -1;
}

}  // namespace lockstep::elastic

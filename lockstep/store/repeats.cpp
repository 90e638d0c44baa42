#include <lockstep/store/repeats.h>

#include <algorithm>

namespace lockstep::store {

Repeats::Verdict Repeats::look_up(const std::string& client, std::uint64_t call,
                                  std::uint64_t answered) {
  Calls& calls = touch(client);
  calls.answered = std::max(calls.answered, answered);
  calls.results.erase(calls.results.begin(), calls.results.lower_bound(calls.answered));
  if (call < calls.answered) return {Kind::stale, 0};
  const auto found = calls.results.find(call);
  if (found == calls.results.end()) return {Kind::fresh, 0};
  return {Kind::repeated, found->second};
}

void Repeats::remember(const std::string& client, std::uint64_t call, std::int64_t result) {
  auto& results = touch(client).results;
  results[call] = result;
  if (results.size() > kMostCalls) results.erase(results.begin());
}

Repeats::Calls& Repeats::touch(const std::string& client) {
  if (const auto found = index_.find(client); found != index_.end()) {
    clients_.splice(clients_.begin(), clients_, found->second);
    return found->second->second;
  }
  if (clients_.size() >= kMostClients) {
    index_.erase(clients_.back().first);
    clients_.pop_back();
  }
  clients_.emplace_front(client, Calls{});
  index_.emplace(client, clients_.begin());
  return clients_.front().second;
}

}  // namespace lockstep::store

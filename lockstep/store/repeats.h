// Which changes of which client have been made already: what keeps a request that is sent again
// after a broken connection from being applied twice.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace lockstep::store {

// Remembers, for each client, the results of its calls that may still be repeated. Bounded: past
// kMostClients the client that has been silent longest is forgotten, past kMostCalls a client's
// oldest call. Not thread-safe.
class Repeats {
 public:
  static constexpr std::size_t kMostClients = 1 << 16;
  static constexpr std::size_t kMostCalls = 1024;

  enum class Kind : std::uint8_t {
    fresh,     // not seen before: carry it out
    repeated,  // carried out; here is what came of it
    stale,     // the client has its answer or gave up: this came late on an old connection
  };
  struct Verdict {
    Kind kind = Kind::fresh;
    std::int64_t result = 0;
  };

  // To be asked before a change is made. Forgets the client's calls below `answered`.
  Verdict look_up(const std::string& client, std::uint64_t call, std::uint64_t answered);

  // To be told after it is made; the client has been looked up just before.
  void remember(const std::string& client, std::uint64_t call, std::int64_t result);

 private:
  struct Calls {
    std::uint64_t answered = 0;
    std::map<std::uint64_t, std::int64_t> results;
  };
  using Clients = std::list<std::pair<std::string, Calls>>;

  Calls& touch(const std::string& client);

  Clients clients_;  // the one heard from last stands first
  std::unordered_map<std::string, Clients::iterator> index_;
};

}  // namespace lockstep::store

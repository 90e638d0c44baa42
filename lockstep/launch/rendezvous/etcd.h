// A client of etcd, version 3.4 or later, through its HTTP gateway.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/address.h>

namespace lockstep::launch {

// A client of one cluster: plain HTTP, without user or password. Nothing that comes from there is
// trusted: answers are bounded, and one in another form than etcd's is an error. Any member of the
// cluster may be asked; the one that answered last is asked first. Not thread-safe.
//
// Calls throw CommError: timeout or peer_lost where no member answers, corrupted where what answers
// is no etcd, refused where etcd says no. A call that failed may have been carried out all the
// same.
class Etcd {
 public:
  struct Lease {
    std::int64_t id = 0;
    milliseconds ttl{0};
  };

  // The value of a key. A key that does not exist has revisions of 0.
  struct Value {
    std::string text;
    std::int64_t create_revision = 0;
    std::int64_t mod_revision = 0;
    std::int64_t lease = 0;

    bool exists() const { return create_revision != 0; }
  };

  // Carried out as a whole where each key of `conditions` has the revision that it names, and not
  // at all otherwise. `reads` happen in any case, after the rest.
  struct Transaction {
    enum class Revision { create, mod };
    struct Condition {
      std::string key;
      Revision revision = Revision::create;
      std::int64_t equals = 0;
    };
    struct Put {
      std::string key;
      std::string text;
      std::int64_t lease = 0;  // 0: for good
    };
    std::vector<Condition> conditions;
    std::vector<Put> puts;
    std::vector<std::string> erased;
    std::vector<std::string> reads;
  };
  struct Outcome {
    bool held = false;          // all conditions did
    std::int64_t revision = 0;  // the cluster's, afterwards
    std::vector<Value> values;  // of `reads`
  };

  explicit Etcd(std::vector<net::Address> members);

  Lease grant(milliseconds ttl, const Deadline& deadline);

  // How long the lease lasts from now; zero where it is gone.
  milliseconds keep_alive(std::int64_t lease, const Deadline& deadline);

  void revoke(std::int64_t lease, const Deadline& deadline);

  Outcome transact(const Transaction& transaction, const Deadline& deadline);

  // "10.0.0.1:2379 or 10.0.0.2:2379"
  std::string members() const;

 private:
  std::string post(const std::string& path, const std::string& json, const Deadline& deadline);

  const std::vector<net::Address> members_;
  std::size_t first_ = 0;  // the one to ask first
};

// Parsers of etcd's answers, public so that tests can feed them malformed ones. CommError
// (corrupted) where a text is no such answer.
Etcd::Lease parse_granted_lease(const std::string& json);
milliseconds parse_kept_lease(const std::string& json);
Etcd::Outcome parse_outcome(const std::string& json, std::size_t num_reads);

// As much of HTTP/1.1 as etcd's gateway needs: one question and one answer per connection.
struct HttpAnswer {
  int status = 0;
  std::string body;
};

// etcd's answers to our requests have a few hundred bytes; a longer one comes from something else.
inline constexpr std::size_t kLongestAnswer = 64 << 10;

// `bytes` is everything that came until the other side closed the connection. CommError (corrupted)
// where that is no whole answer.
HttpAnswer parse_http_answer(std::string_view bytes);

// Sends JSON and reads the answer. CommError: timeout at the deadline, peer_lost where nobody
// listens or the connection breaks, corrupted where the answer is no HTTP. UsageError where the
// host's name does not resolve.
HttpAnswer http_post(const net::Address& server, const std::string& path, const std::string& json,
                     const Deadline& deadline);

}  // namespace lockstep::launch

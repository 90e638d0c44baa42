// As much of HTTP/1.1 as etcd's gateway needs: one question, one answer, a connection each.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <lockstep/base/deadline.h>
#include <lockstep/net/address.h>

namespace lockstep::elastic {

struct HttpAnswer {
  int status = 0;
  std::string body;
};

// Ours are a few hundred bytes. Whoever answers with more is not who was asked.
inline constexpr std::size_t kLongestAnswer = 64 << 10;

// Everything that came until the other side closed the connection. CommError (corrupted) where
// that is no whole answer.
HttpAnswer parse_http_answer(std::string_view bytes);

// Sends JSON and reads the answer. CommError: timeout at the deadline, peer_lost where nobody
// listens or the connection breaks, corrupted where the answer is none. UsageError where the host's
// name does not resolve.
HttpAnswer http_post(const net::Address& server, const std::string& path, const std::string& json,
                     const Deadline& deadline);

}  // namespace lockstep::elastic

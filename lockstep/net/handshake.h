// Proof, on a fresh connection, that both sides know the job's secret, without showing it.
//
//   connector → acceptor   magic, a nonce, the purpose (what the connection is for)
//   acceptor  → connector  a nonce, HMAC over both nonces and the purpose
//   connector → acceptor   HMAC over the same in the other direction
//   acceptor  → connector  one byte: welcome
//
// Each side signs the other's nonce, so a recorded exchange proves nothing later; the directions
// are signed apart, so a reply cannot be played back to its sender.
#pragma once

#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

namespace lockstep::net {

// Longest text a connector may send to say what the connection is for.
inline constexpr std::size_t kLongestPurpose = 512;

// The connector's side. CommError: refused where the other side's proof is wrong or it hung up on
// ours; timeout at the deadline.
void introduce(const Fd& socket, const Secret& secret, const std::string& purpose,
               const Deadline& deadline);

// The acceptor's side; returns the purpose. CommError as above; the caller just drops the
// connection.
std::string welcome(const Fd& socket, const Secret& secret, const Deadline& deadline);

}  // namespace lockstep::net

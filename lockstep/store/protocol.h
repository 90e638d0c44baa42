// The protocol between client and server of the store, once the handshake is done.
//
//   server → client   a Greeting: which server this is, and of which generation of the job; a
//   client
//                     of another generation gets nothing more
//   client → server   a request: its size in 4 bytes, then its body
//   server → client   the reply to it, likewise; then the next request may follow
//
// Numbers are little-endian. Parsing is a pure function over bytes: it looks at nothing else, takes
// no memory before it has checked a size, and accepts exactly what the encoder makes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/store/store.h>

namespace lockstep::store {

// The handshake's purpose: this, and a text that names the client (its session); where it is not of
// the job's first generation, then a slash and the generation's number.
inline constexpr char kPurpose[] = "store ";
std::string purpose_of(const std::string& session, std::uint32_t generation);

// The generation that a purpose ends with; nothing where what follows the slash is no number.
std::optional<std::uint32_t> generation_in(std::string_view purpose);

// A server gives a newcomer no longer to prove itself, and a client waits no longer for that.
inline constexpr milliseconds kHandshakeTime(5000);

// Random, one for each server: tells a client that it still talks to the one it began with. The
// last four bytes are the generation that the server is of.
using Greeting = std::array<std::byte, 20>;
Greeting make_greeting(std::uint32_t generation);
std::uint32_t generation_in(const Greeting& greeting);

inline constexpr std::size_t kSizeBytes = 4;
inline constexpr std::size_t kLongestRequest = 4 << 20;
inline constexpr std::size_t kLongestReply = 64 << 20;
// The limit of a reply's values together, so that the reply around them stays under its own.
inline constexpr std::size_t kMostValueBytes = 48 << 20;

enum class Op : std::uint8_t { set = 1, get, wait, compare_and_set, add, watch, remove };

const char* name(Op op);

struct Request {
  Op op = Op::get;
  // Numbers of one client's calls, ascending; every call below `answered` has its answer or has
  // been given up, so the server may forget it.
  std::uint64_t number = 0;
  std::uint64_t answered = 0;
  std::vector<std::string> keys;        // one; any number for wait
  std::string value;                    // set; compare_and_set: the value desired
  std::optional<std::string> expected;  // compare_and_set
  std::int64_t amount = 0;              // add
  std::uint64_t seen = 0;               // watch
  std::uint64_t patience_ms = 0;        // wait, watch: how long the client will wait

  bool operator==(const Request&) const = default;
};

enum class Status : std::uint8_t {
  ok,
  absent,      // get: no such key
  different,   // compare_and_set: values holds what stands there, if anything
  timeout,     // wait: values holds the missing keys; watch
  full,        // number: bytes that the store holds
  not_number,  // add: values holds what stands there
  overflow,    // add: number is what stands there
  too_large,   // wait: number is the size of the values together
};

struct Reply {
  Status status = Status::ok;
  std::int64_t number = 0;  // add: the sum; watch: the version; remove: 1 where the key existed
  std::vector<std::string> values;

  bool operator==(const Reply&) const = default;
};

// Bytes to send, with their size in front.
std::vector<std::byte> encode(const Request& request);
std::vector<std::byte> encode(const Reply& reply);

// The size in front of a body; nothing where it exceeds `longest`.
std::optional<std::size_t> parse_size(std::span<const std::byte, kSizeBytes> bytes,
                                      std::size_t longest);

// A body, without its size. Nothing where it is not exactly one request or reply within the limits.
std::optional<Request> parse_request(std::span<const std::byte> body);
std::optional<Reply> parse_reply(std::span<const std::byte> body);

}  // namespace lockstep::store

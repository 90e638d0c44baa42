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

// The handshake's purpose: this prefix and a text that names the client (its session). After the
// job's first generation, a slash and the generation's number follow.
inline constexpr char kPurpose[] = "store ";
std::string purpose_of(const std::string& session, std::uint32_t generation);

// The generation that a purpose ends with; nothing if the text after the slash is no number.
std::optional<std::uint32_t> generation_in(std::string_view purpose);

// How long a server gives a newcomer to prove itself, and how long a client waits for that.
inline constexpr milliseconds kHandshakeTime(5000);

// Random bytes, different for each server: they tell a client that it still talks to the server it
// began with. The last four bytes are the server's generation.
using Greeting = std::array<std::byte, 20>;
Greeting make_greeting(std::uint32_t generation);
std::uint32_t generation_in(const Greeting& greeting);

inline constexpr std::size_t kSizeBytes = 4;
inline constexpr std::size_t kLongestRequest = 4 << 20;
inline constexpr std::size_t kLongestReply = 64 << 20;
// The limit of all values of a reply together, which keeps the whole reply under its own limit.
inline constexpr std::size_t kMostValueBytes = 48 << 20;

enum class Op : std::uint8_t { set = 1, get, wait, compare_and_set, add, watch, remove };

const char* name(Op op);

struct Request {
  Op op = Op::get;
  // Calls of one client are numbered, ascending. Every call below `answered` has been answered or
  // given up, so the server may forget it.
  std::uint64_t number = 0;
  std::uint64_t answered = 0;
  std::vector<std::string> keys;        // one key; for wait, any number
  std::string value;                    // set; for compare_and_set, the desired value
  std::optional<std::string> expected;  // compare_and_set
  std::int64_t amount = 0;              // add
  std::uint64_t seen = 0;               // watch
  std::uint64_t patience_ms = 0;        // wait, watch: how long the client will wait

  bool operator==(const Request&) const = default;
};

enum class Status : std::uint8_t {
  ok,
  absent,      // get: no such key
  different,   // compare_and_set: values holds the current value, if any
  timeout,     // wait: values holds the missing keys; watch
  full,        // number: the bytes that the store holds
  not_number,  // add: values holds the current value
  overflow,    // add: number is the current value
  too_large,   // wait: number is the size of all values together
};

struct Reply {
  Status status = Status::ok;
  std::int64_t number = 0;  // add: the sum; watch: the version; remove: 1 if the key existed
  std::vector<std::string> values;

  bool operator==(const Reply&) const = default;
};

// Bytes to send, with their size in front.
std::vector<std::byte> encode(const Request& request);
std::vector<std::byte> encode(const Reply& reply);

// The size in front of a body; nothing if it exceeds `longest`.
std::optional<std::size_t> parse_size(std::span<const std::byte, kSizeBytes> bytes,
                                      std::size_t longest);

// Parses a body, without its size. Nothing if it is not exactly one request or reply within the
// limits.
std::optional<Request> parse_request(std::span<const std::byte> body);
std::optional<Reply> parse_reply(std::span<const std::byte> body);

}  // namespace lockstep::store

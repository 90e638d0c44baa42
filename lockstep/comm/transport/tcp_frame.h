// What travels over a TCP link: the word that opens every connection, and frames after it. Numbers
// are little-endian, as on every machine this runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <lockstep/comm/fingerprint.h>

namespace lockstep::comm {

// Messages travel in pieces of at most this.
constexpr std::size_t kLargestPayload = 256u << 10;

// The first thing on every connection, both ways: how far the last one got.
struct Resume {
  static constexpr std::uint32_t kMagic = 0x4c535253;

  std::uint32_t magic = kMagic;
  std::uint32_t reserved = 0;
  std::uint64_t received = 0;  // data frames so far, on all connections
};
static_assert(sizeof(Resume) == 16);

// Data frames are numbered and kept until acknowledged; the others are neither.
enum class FrameKind : std::uint32_t { data = 1, acknowledgement = 2, notice = 3, goodbye = 4 };

// Stands before every payload. Every frame acknowledges all data frames received so far.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x4c53464d;

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::data;
  std::uint64_t number = 0;  // of a data frame, from 1
  std::uint64_t acknowledged = 0;
  std::uint64_t message_bytes = 0;  // of the whole message that a data frame is a piece of
  Fingerprint call;
  std::uint32_t bytes = 0;     // of the payload
  std::uint32_t checksum = 0;  // of the payload
  std::uint32_t reserved = 0;
  std::uint32_t header_checksum = 0;

  FrameHeader() = default;
  FrameHeader(FrameKind kind, std::span<const std::byte> payload);

  // Makes the checksum that of the other fields.
  void seal();
  // Whether this is a header as a peer writes it. What is not sound says nothing, its size least of
  // all.
  bool sound() const;
  bool fits(std::span<const std::byte> payload) const;
};
static_assert(sizeof(FrameHeader) == 80);

// What became of an attempt to read or write without waiting.
enum class Attempt : std::uint8_t {
  whole,    // all of it
  partly,   // some; the rest later
  nothing,  // later
  ended,    // the connection takes, or gives, no more
  damaged,  // what came is not what was sent
};

}  // namespace lockstep::comm

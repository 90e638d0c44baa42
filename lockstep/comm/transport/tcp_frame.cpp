#include <lockstep/comm/transport/tcp_frame.h>

#include <lockstep/base/hash.h>

namespace lockstep::comm {

namespace {

std::uint32_t checksum_of(FrameHeader header) {
  header.header_checksum = 0;
  return crc32c(std::as_bytes(std::span(&header, 1)));
}

}  // namespace

FrameHeader::FrameHeader(FrameKind kind, std::span<const std::byte> payload)
    : kind(kind), bytes(static_cast<std::uint32_t>(payload.size())), checksum(crc32c(payload)) {}

void FrameHeader::seal() { header_checksum = checksum_of(*this); }

bool FrameHeader::sound() const {
  return magic == kMagic && header_checksum == checksum_of(*this) && bytes <= kLargestPayload;
}

bool FrameHeader::fits(std::span<const std::byte> payload) const {
  return payload.size() == bytes && crc32c(payload) == checksum;
}

}  // namespace lockstep::comm

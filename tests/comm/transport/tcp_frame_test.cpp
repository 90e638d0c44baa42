// Tells frame headers that a peer may have written from others.
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/comm/transport/tcp_frames.h>

namespace lockstep::comm::testing {
namespace {

FrameHeader sealed(std::uint32_t bytes) {
  FrameHeader header;
  header.bytes = bytes;
  header.seal();
  return header;
}

TEST(TcpFrame, SizesAreBoundedWhateverTheChecksumSays) {
  EXPECT_TRUE(sealed(0).sound());
  EXPECT_TRUE(sealed(kLargestPayload).sound());
  EXPECT_FALSE(sealed(kLargestPayload + 1).sound());
  EXPECT_FALSE(sealed(0xffffffff).sound());
}

TEST(TcpFrame, NoBitOfAHeaderCanFlipUnseen) {
  FrameHeader header = sealed(100);
  const auto bytes = std::as_writable_bytes(std::span(&header, 1));
  for (std::byte& byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= static_cast<std::byte>(1 << bit);
      EXPECT_FALSE(header.sound());
      byte ^= static_cast<std::byte>(1 << bit);
    }
  }
  EXPECT_TRUE(header.sound());
}

TEST(TcpFrame, APayloadFitsItsHeaderOrNot) {
  std::vector<std::byte> payload(100, std::byte{5});
  const FrameHeader header(FrameKind::data, payload);
  EXPECT_TRUE(header.fits(payload));
  payload[50] ^= std::byte{1};
  EXPECT_FALSE(header.fits(payload));
  payload[50] ^= std::byte{1};
  EXPECT_FALSE(header.fits(std::span(payload).first(99)));
}

}  // namespace
}  // namespace lockstep::comm::testing

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string_view>
#include <vector>

#include <lockstep/base/hash.h>

namespace lockstep {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Computes the checksum from its definition, a bit at a time.
std::uint32_t naive(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xffffffffu;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}

// RFC 3720, appendix B.4, and the check value of the CRC catalogues.
TEST(Crc32c, KnownVectors) {
  EXPECT_EQ(crc32c({}), 0u);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  std::array<std::byte, 32> block{};
  EXPECT_EQ(crc32c(block), 0x8a9136aau);
  block.fill(std::byte{0xff});
  EXPECT_EQ(crc32c(block), 0x62a8ab43u);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(block), 0x46dd794eu);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(crc32c(block), 0x113fdb5cu);
}

TEST(Crc32c, EveryMethodEveryLengthAndAlignment) {
  std::mt19937 random(1);
  std::vector<std::byte> data(5000 + 8);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  for (std::size_t length = 0; length <= 5000; ++length) {
    const auto piece = std::span(data).subspan(length % 8, length);
    const std::uint32_t expected = naive(piece);
    for (const Crc32cMethod& method : crc32c_methods())
      ASSERT_EQ(method.compute(piece, 0), expected) << method.name << " of " << length;
  }
}

TEST(Crc32c, Chains) {
  std::mt19937 random(2);
  std::vector<std::byte> data(7000);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  const std::uint32_t whole = crc32c(data);
  for (int i = 0; i < 200; ++i) {
    const auto first = std::span(data).first(random() % (data.size() + 1));
    const auto rest = std::span(data).subspan(first.size());
    for (const Crc32cMethod& method : crc32c_methods())
      ASSERT_EQ(method.compute(rest, method.compute(first, 0)), whole)
          << method.name << " from " << first.size();
  }
}

TEST(Crc32c, SeesEveryFlippedBit) {
  std::vector<std::byte> data(4000);
  const std::uint32_t whole = crc32c(data);
  for (std::size_t bit = 0; bit < 8 * data.size(); bit += 7) {
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    ASSERT_NE(crc32c(data), whole) << bit;
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace lockstep

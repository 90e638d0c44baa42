// The wire format: messages are decoded as they were encoded, and nothing else is accepted.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include <lockstep/store/protocol.h>

namespace lockstep::store {
namespace {

std::vector<Request> requests() {
  const std::string key = "key";
  const std::string bytes("\0\xff value", 8);
  return {
      {.op = Op::set, .number = 1, .answered = 1, .keys = {key}, .value = bytes},
      {.op = Op::set,
       .number = 1,
       .keys = {std::string(kLongestKey, 'k')},
       .value = std::string(kLongestValue, 'v')},
      {.op = Op::get, .number = std::numeric_limits<std::uint64_t>::max(), .keys = {""}},
      {.op = Op::wait, .number = 7, .keys = {}, .patience_ms = 5},
      {.op = Op::wait, .number = 7, .keys = {"a", "", "ccc"}, .patience_ms = ~0ull},
      {.op = Op::compare_and_set, .number = 2, .keys = {key}, .value = bytes},
      {.op = Op::compare_and_set, .number = 2, .keys = {key}, .value = "", .expected = ""},
      {.op = Op::compare_and_set,
       .number = 2,
       .keys = {key},
       .value = std::string(kLongestValue, 'v'),
       .expected = std::string(kLongestValue, 'w')},
      {.op = Op::add,
       .number = 3,
       .keys = {key},
       .amount = std::numeric_limits<std::int64_t>::min()},
      {.op = Op::watch, .number = 4, .keys = {key}, .seen = 9, .patience_ms = 1000},
      {.op = Op::remove, .number = 5, .answered = 4, .keys = {key}},
  };
}

std::vector<Reply> replies() {
  return {
      {},
      {.status = Status::absent},
      {.status = Status::timeout, .values = {"a", "b"}},
      {.status = Status::ok, .number = -1, .values = {std::string(kLongestValue, 'x')}},
      {.status = Status::too_large, .number = std::numeric_limits<std::int64_t>::max()},
  };
}

std::span<const std::byte> body(const std::vector<std::byte>& message) {
  const auto size = parse_size(std::span(message).first<kSizeBytes>(), kLongestReply);
  EXPECT_EQ(size, message.size() - kSizeBytes);
  return std::span(message).subspan(kSizeBytes);
}

TEST(Protocol, RequestsComeBackAsTheyWere) {
  for (const Request& request : requests())
    EXPECT_EQ(parse_request(body(encode(request))), request) << name(request.op);
}

TEST(Protocol, RepliesComeBackAsTheyWere) {
  for (const Reply& reply : replies()) EXPECT_EQ(parse_reply(body(encode(reply))), reply);
}

TEST(Protocol, EveryTruncationAndExtensionIsRefused) {
  for (const Request& request : requests()) {
    auto bytes = encode(request);
    const auto whole = body(bytes);
    // Long messages are cut only near their ends, because the middle of a value is like the rest of
    // it.
    for (std::size_t size = 0; size < whole.size(); size += size < 200 ? 1 : 99991)
      EXPECT_EQ(parse_request(whole.first(size)), std::nullopt) << name(request.op) << size;
    bytes.push_back(std::byte{});
    EXPECT_EQ(parse_request(std::span(bytes).subspan(kSizeBytes)), std::nullopt);
  }
  for (const Reply& reply : replies()) {
    auto bytes = encode(reply);
    const auto whole = body(bytes);
    for (std::size_t size = 0; size < whole.size(); size += size < 200 ? 1 : 99991)
      EXPECT_EQ(parse_reply(whole.first(size)), std::nullopt) << size;
    bytes.push_back(std::byte{});
    EXPECT_EQ(parse_reply(std::span(bytes).subspan(kSizeBytes)), std::nullopt);
  }
}

TEST(Protocol, SizesAreBounded) {
  const auto size_of = [](std::uint32_t size) {
    std::array<std::byte, kSizeBytes> bytes;
    std::memcpy(bytes.data(), &size, sizeof(size));
    return parse_size(bytes, 1000);
  };
  EXPECT_EQ(size_of(0), 0u);
  EXPECT_EQ(size_of(1000), 1000u);
  EXPECT_EQ(size_of(1001), std::nullopt);
  EXPECT_EQ(size_of(0xffffffffu), std::nullopt);
}

// A body with the op, a number and an answered mark, and then the given words.
std::vector<std::byte> raw(std::uint8_t op, std::initializer_list<std::uint32_t> words) {
  std::vector<std::byte> bytes(17);
  bytes[0] = static_cast<std::byte>(op);
  for (const std::uint32_t word : words) {
    const auto part = std::as_bytes(std::span(&word, 1));
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

TEST(Protocol, LiesAboutSizesAreRefused) {
  EXPECT_NE(parse_request(raw(2, {0})), std::nullopt);  // get of the empty key
  EXPECT_EQ(parse_request(raw(2, {1})), std::nullopt);
  EXPECT_EQ(parse_request(raw(2, {0xffffffffu})), std::nullopt);
  EXPECT_EQ(parse_request(raw(0, {0})), std::nullopt);
  EXPECT_EQ(parse_request(raw(8, {0})), std::nullopt);
  EXPECT_NE(parse_request(raw(3, {0, 0, 0})), std::nullopt);  // wait for no keys
  EXPECT_EQ(parse_request(raw(3, {0, 0, 1})), std::nullopt);
  EXPECT_EQ(parse_request(raw(3, {0, 0, 0xffffffffu})), std::nullopt);
  EXPECT_EQ(parse_request(raw(3, {0, 0, kMostKeysInWait + 1})), std::nullopt);
  auto flagged = raw(4, {0});
  flagged.push_back(std::byte{2});
  EXPECT_EQ(parse_request(flagged), std::nullopt);

  // A key and a value over their limits, with all of their bytes.
  std::vector<std::byte> long_key = raw(2, {kLongestKey + 1});
  long_key.resize(long_key.size() + kLongestKey + 1);
  EXPECT_EQ(parse_request(long_key), std::nullopt);
  std::vector<std::byte> long_value = raw(1, {0, kLongestValue + 1});
  long_value.resize(long_value.size() + kLongestValue + 1);
  EXPECT_EQ(parse_request(long_value), std::nullopt);
  std::vector<std::byte> many = raw(3, {0, 0, kMostKeysInWait + 1});
  many.resize(many.size() + 4 * (kMostKeysInWait + 1));
  EXPECT_EQ(parse_request(many), std::nullopt);
}

}  // namespace
}  // namespace lockstep::store

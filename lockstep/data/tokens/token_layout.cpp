#include <lockstep/data/tokens/token_layout.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include <lockstep/base/error.h>

namespace lockstep::data {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

namespace {

// Calls `action` with a value of the type's C++ type.
template <typename Action>
auto with_type(TokenType type, Action&& action) {
  switch (type) {
    case TokenType::u8: return action(std::uint8_t{});
    case TokenType::i8: return action(std::int8_t{});
    case TokenType::u16: return action(std::uint16_t{});
    case TokenType::i16: return action(std::int16_t{});
    case TokenType::u32: return action(std::uint32_t{});
    case TokenType::i32: return action(std::int32_t{});
    case TokenType::i64: return action(std::int64_t{});
  }
  LOCKSTEP_CHECK(false, "a token type that is none: {}", static_cast<int>(type));
  return action(std::uint8_t{});
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The place among `count` items of the first that is not in [0, vocabulary_size); `count` where
// there is none.
template <typename T>
std::int64_t first_outside(const std::byte* items, std::int64_t count,
                           std::int64_t vocabulary_size) {
  // Without their sign, negative tokens are larger than all others.
  using Unsigned = std::make_unsigned_t<T>;
  constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
  auto limit = static_cast<std::uint64_t>(std::max<std::int64_t>(vocabulary_size, 0));
  if (limit > largest) {
    if (std::is_unsigned_v<T>) return count;
    limit = largest + 1;
  }
  const auto outside = [&](std::int64_t i) {
    return load<Unsigned>(items + i * static_cast<std::int64_t>(sizeof(T))) >= limit;
  };
  constexpr std::int64_t block = 1024;
  std::int64_t begin = 0;
  for (; begin + block <= count; begin += block) {
    const std::byte* const from = items + begin * static_cast<std::int64_t>(sizeof(T));
    Unsigned highest = 0;
    for (std::int64_t i = 0; i < block; ++i)
      highest = std::max(highest, load<Unsigned>(from + i * static_cast<std::int64_t>(sizeof(T))));
    if (highest >= limit) break;
  }
  while (begin < count && !outside(begin)) ++begin;
  return begin;
}

}  // namespace

int item_bytes(TokenType type) {
  return with_type(type, [](auto value) { return static_cast<int>(sizeof value); });
}

std::int64_t max_token(TokenType type) {
  return with_type(type, [](auto value) {
    return static_cast<std::int64_t>(std::numeric_limits<decltype(value)>::max());
  });
}

std::string token_type_name(TokenType type) {
  return with_type(type, [](auto value) {
    return fmt::format("{}{}-bit", std::is_signed_v<decltype(value)> ? "signed " : "",
                       8 * sizeof value);
  });
}

TokenLayout::TokenLayout(TokenType type, std::int64_t first_byte, std::int64_t count)
    : type_(type) {
  append(first_byte, count);
}

void TokenLayout::append(std::int64_t first_byte, std::int64_t count) {
  LOCKSTEP_CHECK(count >= 0 && count <= std::numeric_limits<std::int64_t>::max() - size_);
  if (count == 0) return;
  const bool follows =
      !runs_.empty() && first_byte == runs_.back().first_byte +
                                          (size_ - runs_.back().first_token) * item_bytes(type_);
  if (!follows) runs_.push_back({.first_token = size_, .first_byte = first_byte});
  size_ += count;
}

bool TokenLayout::lies_in(std::uint64_t file_bytes) const {
  for (std::size_t run = 0; run < runs_.size(); ++run) {
    const auto first = static_cast<std::uint64_t>(runs_[run].first_byte);
    const auto count = static_cast<std::uint64_t>(end_of(run) - runs_[run].first_token);
    if (runs_[run].first_byte < 0 || first > file_bytes ||
        count > (file_bytes - first) / static_cast<std::uint64_t>(item_bytes(type_)))
      return false;
  }
  return true;
}

void TokenLayout::copy(std::span<const std::byte> file, std::int64_t first,
                       std::span<std::int64_t> tokens) const {
  LOCKSTEP_CHECK(first >= 0 && first <= size_ && std::ssize(tokens) <= size_ - first);
  const auto after = std::upper_bound(
      runs_.begin(), runs_.end(), first,
      [](std::int64_t position, const Run& run) { return position < run.first_token; });
  auto run = static_cast<std::size_t>(after - runs_.begin());
  while (!tokens.empty()) {
    const Run here = runs_[run - 1];
    const std::int64_t count = std::min<std::int64_t>(std::ssize(tokens), end_of(run - 1) - first);
    with_type(type_, [&](auto value) {
      constexpr std::size_t bytes = sizeof value;
      const std::byte* from = file.data() + here.first_byte +
                              (first - here.first_token) * static_cast<std::int64_t>(bytes);
      for (std::int64_t& token : tokens.first(static_cast<std::size_t>(count))) {
        token = static_cast<std::int64_t>(load<decltype(value)>(from));
        from += bytes;
      }
    });
    tokens = tokens.subspan(static_cast<std::size_t>(count));
    first += count;
    ++run;
  }
}

std::optional<PlacedToken> TokenLayout::first_outside(std::span<const std::byte> file,
                                                      std::int64_t vocabulary_size) const {
  for (std::size_t run = 0; run < runs_.size(); ++run) {
    const std::int64_t begin = runs_[run].first_token;
    const std::int64_t count = end_of(run) - begin;
    const std::int64_t place = with_type(type_, [&](auto value) {
      return data::first_outside<decltype(value)>(file.data() + runs_[run].first_byte, count,
                                                  vocabulary_size);
    });
    if (place == count) continue;
    PlacedToken found{.position = begin + place, .token = 0};
    copy(file, found.position, {&found.token, 1});
    return found;
  }
  return std::nullopt;
}

}  // namespace lockstep::data

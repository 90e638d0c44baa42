#include <lockstep/data/tokens/token_format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <type_traits>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>

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

// Each is in a file of its name beside this one.
TokenFormat text_format();
TokenFormat nanogpt_format();
TokenFormat llm_c_format();
TokenFormat megatron_format();

namespace {

class Table {
 public:
  std::vector<const TokenFormat*> rows() const {
    const std::lock_guard lock(mutex_);
    std::vector<const TokenFormat*> rows;
    for (const TokenFormat& row : rows_) rows.push_back(&row);
    return rows;
  }

  void add(TokenFormat format) {
    const std::lock_guard lock(mutex_);
    const bool taken =
        format.name == kAutomaticFormat ||
        std::ranges::any_of(rows_, [&](const TokenFormat& row) { return row.name == format.name; });
    if (taken)
      throw UsageError("there is a format of token files called '{}' already: choose another name",
                       format.name);
    if (format.name.empty() || format.recognises == nullptr || format.layout == nullptr)
      throw UsageError("the format '{}' of token files cannot be added: it needs a name, "
                       "`recognises` and `layout`",
                       format.name);
    rows_.push_back(std::move(format));
  }

 private:
  mutable std::mutex mutex_;
  // A deque, as its elements stay where they are when rows are added.
  std::deque<TokenFormat> rows_{text_format(), nanogpt_format(), llm_c_format(), megatron_format()};
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

std::vector<const TokenFormat*> token_formats() { return table().rows(); }

void add_token_format(TokenFormat format) { table().add(std::move(format)); }

const TokenFormat& token_format(std::string_view name) {
  std::vector<std::string_view> names = {kAutomaticFormat};
  for (const TokenFormat* row : token_formats()) {
    if (row->name == name) return *row;
    names.push_back(row->name);
  }
  throw UsageError("'{}' is no format of token files{} (there are {})", name,
                   did_you_mean(name, names), fmt::join(names, ", "));
}

const TokenFormat& token_format_of(const std::filesystem::path& path, std::string_view name) {
  if (name != kAutomaticFormat) return token_format(name);
  const auto rows = token_formats();
  const auto found = std::find_if(rows.rbegin(), rows.rend(),
                                  [&](const TokenFormat* row) { return row->recognises(path); });
  LOCKSTEP_CHECK(found != rows.rend(), "text is any file");
  return **found;
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& path,
                                            const TokenFormat& format) {
  if (format.files == nullptr) return {path};
  return format.files(path);
}

std::string list_token_formats() {
  std::vector<std::string> all;
  for (const TokenFormat* row : token_formats())
    all.push_back(row->note.empty() ? row->name : fmt::format("{} ({})", row->name, row->note));
  return fmt::format("{}", fmt::join(all, ", "));
}

void check_not_empty(const TokenBytes& file) {
  if (file.bytes.empty())
    throw UsageError("token file '{}' is empty: was it written to the end?", file.path.string());
}

}  // namespace lockstep::data

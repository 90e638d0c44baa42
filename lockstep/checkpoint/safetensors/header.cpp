#include <lockstep/checkpoint/safetensors/header.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

namespace {

struct Description {
  std::string_view name;
  unsigned bits;
};

// In the order of the enumeration.
constexpr std::array<Description, 22> kTypes{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};
static_assert(kTypes.size() == static_cast<std::size_t>(DType::u64) + 1);

}  // namespace

std::string_view name(DType dtype) { return kTypes[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kTypes.size(); ++i)
    if (kTypes[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

unsigned bits_of(DType dtype) { return kTypes[static_cast<std::size_t>(dtype)].bits; }

bool is_floating(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

std::uint64_t tensor_bytes(DType dtype, std::span<const std::int64_t> shape,
                           const std::string& what) {
  std::int64_t elements = 1;  // without the zeros: strides are products of the others
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) throw UsageError("{}: the shape {} has a size below 0", what, shape_text(shape));
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(elements, size, &elements))
      throw UsageError("{}: the shape {} has 2^63 elements or more", what, shape_text(shape));
  }
  if (empty) return 0;
  std::uint64_t bits = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(elements), bits_of(dtype), &bits))
    throw UsageError("{}: {} elements of {} are more than a file can hold", what, elements,
                     name(dtype));
  if (bits % 8 != 0)
    throw UsageError("{}: {} elements of {} bits do not fill whole bytes", what, elements,
                     bits_of(dtype));
  return bits / 8;
}

namespace {

using nlohmann::json;

constexpr std::uint64_t kPrefixBytes = 8;
constexpr const char* kMetadataKey = "__metadata__";
constexpr std::size_t kMostDims = 64;  // as many as LibTorch can iterate over

std::string place_of(std::string_view file) { return fmt::format("safetensors file '{}'", file); }

std::string place_of(std::string_view file, const TensorEntry& entry) {
  return fmt::format("{}, tensor {}", place_of(file), quote(entry.name));
}

// nlohmann's parser calls this for each token. It throws at the first that does not belong there.
// Tokens go straight into entries: a tree of them would take many times the 100 MB of a header.
class HeaderReader final : public json::json_sax_t {
 public:
  HeaderReader(std::string_view file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { unexpected("a number below 0"); }
  bool number_float(number_float_t, const string_t&) override {
    unexpected("a number that is not whole, or too large");
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail(fmt::format("a size of {} in its shape", value));
      if (entry().shape.size() == kMostDims) fail(fmt::format("more than {} dims", kMostDims));
      entry().shape.push_back(static_cast<std::int64_t>(value));
    } else if (where_ == Where::offsets) {
      if (num_offsets_ == 2) fail("more than two numbers in 'data_offsets'");
      (num_offsets_++ == 0 ? entry().begin : entry().end) = value;
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (where_ == Where::metadata) {
      header_.metadata[key_] = std::move(value);
    } else if (where_ == Where::tensor && field_ == kDType) {
      const auto dtype = dtype_from_name(value);
      if (!dtype) fail(fmt::format("there is no dtype {}", quote(value)));
      entry().dtype = *dtype;
    } else {
      unexpected("a text");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (where_ == Where::outside)
      where_ = Where::top;
    else if (where_ == Where::top)
      where_ = key_ == kMetadataKey ? Where::metadata : Where::tensor;
    else
      unexpected("an object");
    return true;
  }

  bool key(string_t& value) override {
    if (where_ == Where::top) {
      if (value == kMetadataKey) {
        if (std::exchange(has_metadata_, true)) fail("'__metadata__' is there twice");
      } else {
        header_.entries.emplace_back().name = value;
        seen_.reset();
        num_offsets_ = 0;
      }
    } else if (where_ == Where::metadata) {
      if (header_.metadata.contains(value))
        fail(fmt::format("'__metadata__' has the key {} twice", quote(value)));
    } else {
      const auto field = std::find(std::begin(kFields), std::end(kFields), value);
      if (field == std::end(kFields))
        fail(fmt::format("unknown key {}; a tensor has 'dtype', 'shape' and 'data_offsets'",
                         quote(value)));
      field_ = static_cast<std::size_t>(field - std::begin(kFields));
      if (seen_[field_]) fail(fmt::format("the key '{}' is there twice", kFields[field_]));
      seen_.set(field_);
    }
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    if (where_ == Where::tensor)
      for (std::size_t i = 0; i < std::size(kFields); ++i)
        if (!seen_[i]) fail(fmt::format("the key '{}' is missing", kFields[i]));
    where_ = where_ == Where::top ? Where::outside : Where::top;
    return true;
  }

  bool start_array(std::size_t) override {
    if (where_ != Where::tensor || field_ == kDType) unexpected("a list");
    where_ = field_ == kShape ? Where::shape : Where::offsets;
    return true;
  }

  bool end_array() override {
    if (where_ == Where::offsets && num_offsets_ != 2)
      fail("fewer than two numbers in 'data_offsets'");
    where_ = Where::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    fail_at(position);
  }

  // The byte of the JSON, counted from 1.
  [[noreturn]] void fail_at(std::size_t position) const {
    throw UsageError("{}: the header is not valid JSON at byte {} of the file: it is damaged, or "
                     "not a safetensors file",
                     place_of(file_), kPrefixBytes + position);
  }

 private:
  enum class Where { outside, top, metadata, tensor, shape, offsets };
  static constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
  static constexpr std::size_t kDType = 0;
  static constexpr std::size_t kShape = 1;

  TensorEntry& entry() { return header_.entries.back(); }

  [[noreturn]] void fail(const std::string& what) const {
    const bool in_tensor =
        where_ == Where::tensor || where_ == Where::shape || where_ == Where::offsets;
    throw UsageError("{}: {}",
                     in_tensor ? place_of(file_, header_.entries.back()) : place_of(file_), what);
  }

  [[noreturn]] void unexpected(const char* what) const {
    switch (where_) {
      case Where::outside: fail(fmt::format("the header is {}, not an object", what));
      case Where::top: fail(fmt::format("{} under {}, not an object", what, quote(key_)));
      case Where::metadata:
        fail(fmt::format("'__metadata__' has {} under {}, not a text", what, quote(key_)));
      case Where::tensor: fail(fmt::format("{} under '{}'", what, kFields[field_]));
      case Where::shape: fail(fmt::format("{} in its shape", what));
      case Where::offsets: fail(fmt::format("{} in its 'data_offsets'", what));
    }
    throw InternalError("a place in a header that is none");
  }

  std::string_view file_;
  SafetensorsHeader& header_;
  Where where_ = Where::outside;
  std::string key_;        // the last one
  std::size_t field_ = 0;  // the last one of a tensor, in kFields
  std::bitset<3> seen_;    // the fields of the last tensor
  std::size_t num_offsets_ = 0;
  bool has_metadata_ = false;
};

// Reads the length and returns the JSON.
std::string_view header_text(std::span<const std::byte> bytes, std::string_view file) {
  const std::string place = place_of(file);
  if (bytes.size() < kPrefixBytes)
    throw UsageError("{}: has {} bytes, too few for a header: it is {}", place, bytes.size(),
                     bytes.empty() ? "empty" : "cut off, or not a safetensors file");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kLargestHeaderBytes)
    throw UsageError("{}: says its header has {} bytes, and at most {} are allowed: it is damaged, "
                     "or not a safetensors file",
                     place, length, kLargestHeaderBytes);
  if (length > bytes.size() - kPrefixBytes)
    throw UsageError("{}: says its header has {} bytes, and the file has {}: it is cut off, or not "
                     "a safetensors file",
                     place, length, bytes.size());
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kPrefixBytes, length);
  if (!text.starts_with('{'))
    throw UsageError("{}: its header does not begin with '{{': it is not a safetensors file",
                     place);
  return text;
}

void index_names(SafetensorsHeader& header, std::string_view file) {
  const auto& entries = header.entries;
  header.by_name.resize(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) header.by_name[i] = i;
  std::sort(header.by_name.begin(), header.by_name.end(),
            [&](std::size_t a, std::size_t b) { return entries[a].name < entries[b].name; });
  const auto twice = std::adjacent_find(
      header.by_name.begin(), header.by_name.end(),
      [&](std::size_t a, std::size_t b) { return entries[a].name == entries[b].name; });
  if (twice != header.by_name.end())
    throw UsageError("{}: the header names it twice", place_of(file, entries[*twice]));
}

void check_places(const SafetensorsHeader& header, std::uint64_t file_bytes,
                  std::string_view file) {
  std::uint64_t position = 0;
  for (const TensorEntry& entry : header.entries) {
    const std::string place = place_of(file, entry);
    if (entry.begin > entry.end)
      throw UsageError("{}: begins at {} and ends before, at {}", place, entry.begin, entry.end);
    if (entry.begin != position)
      throw UsageError("{}: begins at byte {} of the data, where {} was to be: tensors {}", place,
                       entry.begin, position, entry.begin < position ? "overlap" : "leave a gap");
    const std::uint64_t needed = tensor_bytes(entry.dtype, entry.shape, place);
    if (needed != entry.size_bytes())
      throw UsageError("{}: {} of shape {} takes {} bytes, and the header gives it {}", place,
                       name(entry.dtype), shape_text(entry.shape), needed, entry.size_bytes());
    position = entry.end;
  }
  const std::uint64_t data_bytes = file_bytes - header.data_offset;
  if (position != data_bytes)
    throw UsageError(
        "{}: the header describes {} bytes of data, and the file has {}: {}", place_of(file),
        position, data_bytes,
        position > data_bytes ? "it is cut off; get it again" : "something was added to it");
}

}  // namespace

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto place =
      std::lower_bound(by_name.begin(), by_name.end(), name,
                       [&](std::size_t i, std::string_view n) { return entries[i].name < n; });
  if (place == by_name.end() || entries[*place].name != name) return nullptr;
  return &entries[*place];
}

SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::string_view file) {
  return parse_header(bytes, bytes.size(), file);
}

SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::uint64_t file_bytes,
                               std::string_view file) {
  SafetensorsHeader header;
  const std::string_view text = header_text(bytes, file);
  header.data_offset = kPrefixBytes + text.size();
  HeaderReader reader(file, header);
  // The parser takes a zero byte for the end.
  if (const auto zero = text.find('\0'); zero != std::string_view::npos) reader.fail_at(zero + 1);
  json::sax_parse(text.begin(), text.end(), &reader);
  // Readers see the order of the bytes, whatever that of the JSON.
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const TensorEntry& a, const TensorEntry& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  index_names(header, file);
  check_places(header, file_bytes, file);
  return header;
}

}  // namespace lockstep::checkpoint

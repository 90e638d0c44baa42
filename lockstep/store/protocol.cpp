#include <lockstep/store/protocol.h>

#include <charconv>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/net/secret.h>

namespace lockstep::store {

namespace {

class Writer {
 public:
  Writer() {
    bytes_.reserve(64);
    bytes_.resize(kSizeBytes);
  }

  template <typename T>
  void number(T value) {
    const auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>((bits >> (8 * i)) & 0xff));
  }

  void text(const std::string& value) {
    number(static_cast<std::uint32_t>(value.size()));
    const auto bytes = std::as_bytes(std::span(value));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  void texts(const std::vector<std::string>& values) {
    number(static_cast<std::uint32_t>(values.size()));
    for (const std::string& value : values) text(value);
  }

  std::vector<std::byte> finish(std::size_t longest) {
    const std::size_t size = bytes_.size() - kSizeBytes;
    LOCKSTEP_CHECK(size <= longest, "message of {} bytes", size);
    for (std::size_t i = 0; i < kSizeBytes; ++i)
      bytes_[i] = static_cast<std::byte>((size >> (8 * i)) & 0xff);
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

// Reads from the front. After the first field that does not fit it stays failed, and returns empty
// values from then on.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    if (!has(sizeof(T))) return 0;
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      value |= std::to_integer<std::uint64_t>(bytes_[i]) << (8 * i);
    bytes_ = bytes_.subspan(sizeof(T));
    return static_cast<T>(value);
  }

  std::string text(std::size_t longest) {
    const auto size = number<std::uint32_t>();
    if (size > longest) failed_ = true;
    if (!has(size)) return {};
    std::string value(reinterpret_cast<const char*>(bytes_.data()), size);
    bytes_ = bytes_.subspan(size);
    return value;
  }

  std::vector<std::string> texts(std::size_t most, std::size_t longest) {
    const auto count = number<std::uint32_t>();
    // Each value takes at least four bytes: a count that the rest cannot hold takes no memory.
    if (count > most || count > bytes_.size() / 4) failed_ = true;
    std::vector<std::string> values;
    if (failed_) return values;
    values.reserve(count);
    for (std::uint32_t i = 0; i < count && !failed_; ++i) values.push_back(text(longest));
    return values;
  }

  bool flag() {
    const auto value = number<std::uint8_t>();
    if (value > 1) failed_ = true;
    return value == 1;
  }

  // Whether every value fitted and nothing is left over.
  bool complete() const { return !failed_ && bytes_.empty(); }

 private:
  bool has(std::size_t size) {
    if (size > bytes_.size()) failed_ = true;
    return !failed_;
  }

  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

}  // namespace

std::string purpose_of(const std::string& session, std::uint32_t generation) {
  const std::string purpose = kPurpose + session;
  return generation == 0 ? purpose : fmt::format("{}/{}", purpose, generation);
}

std::optional<std::uint32_t> generation_in(std::string_view purpose) {
  const auto slash = purpose.rfind('/');
  if (slash == std::string_view::npos) return 0;
  const char* const end = purpose.data() + purpose.size();
  std::uint32_t generation = 0;
  const auto [stop, error] = std::from_chars(purpose.data() + slash + 1, end, generation);
  if (error != std::errc() || stop != end) return std::nullopt;
  return generation;
}

Greeting make_greeting(std::uint32_t generation) {
  Greeting greeting;
  net::fill_random(greeting);
  for (std::size_t i = 0; i < sizeof(generation); ++i)
    greeting[greeting.size() - sizeof(generation) + i] =
        static_cast<std::byte>((generation >> (8 * i)) & 0xff);
  return greeting;
}

std::uint32_t generation_in(const Greeting& greeting) {
  std::uint32_t generation = 0;
  for (std::size_t i = 0; i < sizeof(generation); ++i)
    generation |= std::to_integer<std::uint32_t>(greeting[greeting.size() - sizeof(generation) + i])
                  << (8 * i);
  return generation;
}

const char* name(Op op) {
  switch (op) {
    case Op::set: return "set";
    case Op::get: return "get";
    case Op::wait: return "wait";
    case Op::compare_and_set: return "compare_and_set";
    case Op::add: return "add";
    case Op::watch: return "watch";
    case Op::remove: return "remove";
  }
  return "unknown";
}

std::vector<std::byte> encode(const Request& request) {
  Writer out;
  out.number(static_cast<std::uint8_t>(request.op));
  out.number(request.number);
  out.number(request.answered);
  if (request.op == Op::wait) {
    out.number(request.patience_ms);
    out.texts(request.keys);
    return out.finish(kLongestRequest);
  }
  LOCKSTEP_CHECK(request.keys.size() == 1);
  out.text(request.keys.front());
  switch (request.op) {
    case Op::set: out.text(request.value); break;
    case Op::compare_and_set:
      out.number(static_cast<std::uint8_t>(request.expected.has_value()));
      if (request.expected) out.text(*request.expected);
      out.text(request.value);
      break;
    case Op::add: out.number(request.amount); break;
    case Op::watch:
      out.number(request.seen);
      out.number(request.patience_ms);
      break;
    case Op::get:
    case Op::remove:
    case Op::wait: break;
  }
  return out.finish(kLongestRequest);
}

std::vector<std::byte> encode(const Reply& reply) {
  Writer out;
  out.number(static_cast<std::uint8_t>(reply.status));
  out.number(reply.number);
  out.texts(reply.values);
  return out.finish(kLongestReply);
}

std::optional<std::size_t> parse_size(std::span<const std::byte, kSizeBytes> bytes,
                                      std::size_t longest) {
  const std::size_t size = Reader(bytes).number<std::uint32_t>();
  if (size > longest) return std::nullopt;
  return size;
}

std::optional<Request> parse_request(std::span<const std::byte> body) {
  Reader in(body);
  Request request;
  const auto op = in.number<std::uint8_t>();
  if (op < static_cast<std::uint8_t>(Op::set) || op > static_cast<std::uint8_t>(Op::remove))
    return std::nullopt;
  request.op = static_cast<Op>(op);
  request.number = in.number<std::uint64_t>();
  request.answered = in.number<std::uint64_t>();
  if (request.op == Op::wait) {
    request.patience_ms = in.number<std::uint64_t>();
    request.keys = in.texts(kMostKeysInWait, kLongestKey);
  } else {
    request.keys.push_back(in.text(kLongestKey));
  }
  switch (request.op) {
    case Op::set: request.value = in.text(kLongestValue); break;
    case Op::compare_and_set:
      if (in.flag()) request.expected = in.text(kLongestValue);
      request.value = in.text(kLongestValue);
      break;
    case Op::add: request.amount = in.number<std::int64_t>(); break;
    case Op::watch:
      request.seen = in.number<std::uint64_t>();
      request.patience_ms = in.number<std::uint64_t>();
      break;
    case Op::get:
    case Op::remove:
    case Op::wait: break;
  }
  if (!in.complete()) return std::nullopt;
  return request;
}

std::optional<Reply> parse_reply(std::span<const std::byte> body) {
  Reader in(body);
  Reply reply;
  const auto status = in.number<std::uint8_t>();
  if (status > static_cast<std::uint8_t>(Status::too_large)) return std::nullopt;
  reply.status = static_cast<Status>(status);
  reply.number = in.number<std::int64_t>();
  reply.values = in.texts(kMostKeysInWait, kLongestValue);
  if (!in.complete()) return std::nullopt;
  return reply;
}

}  // namespace lockstep::store

#include <lockstep/launch/rendezvous/etcd.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

namespace {

constexpr std::string_view kLineEnd = "\r\n";

[[noreturn]] void fail_http(Fault fault, const std::string& explanation) {
  throw CommError({.fault = fault, .operation = "HTTP request", .explanation = explanation});
}

[[noreturn]] void no_answer(const std::string& what) {
  fail_http(Fault::corrupted, fmt::format("What answered does not speak HTTP/1.1 ({}).", what));
}

// The whole text as a number, which no length of an answer exceeds.
std::optional<std::size_t> number(std::string_view text, int base) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size() || value > kLongestAnswer)
    return std::nullopt;
  return value;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char one, char other) {
    return std::tolower(static_cast<unsigned char>(one)) ==
           std::tolower(static_cast<unsigned char>(other));
  });
}

// Takes the next line off the front of `text`.
std::string_view next_line(std::string_view& text) {
  const auto end = text.find(kLineEnd);
  if (end == std::string_view::npos) no_answer("a line has no end");
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + kLineEnd.size());
  return line;
}

int parse_status(std::string_view line) {
  constexpr std::string_view kVersion = "HTTP/1.";
  // "HTTP/1.1 200 OK"
  if (!line.starts_with(kVersion) || line.size() < 12 || line[8] != ' ')
    no_answer("it does not begin with a status");
  const auto status = number(line.substr(9, 3), 10);
  if (!status || *status < 100 || *status > 599) no_answer("its status is no number");
  return static_cast<int>(*status);
}

// Ignores the trailers after the last chunk.
std::string join_chunks(std::string_view text) {
  std::string body;
  while (true) {
    std::string_view line = next_line(text);
    line = trimmed(line.substr(0, line.find(';')));
    const auto size = number(line, 16);
    if (!size) no_answer("the size of a chunk is no number, or too large");
    if (*size == 0) return body;
    if (text.size() < *size + kLineEnd.size() || text.substr(*size, kLineEnd.size()) != kLineEnd)
      no_answer("it ends within a chunk");
    body += text.substr(0, *size);
    text.remove_prefix(*size + kLineEnd.size());
  }
}

std::string read_until_closed(const net::Fd& socket, const Deadline& deadline) {
  std::string all;
  std::array<char, 4096> bytes;
  while (true) {
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got == 0) return all;
    if (got > 0) {
      all.append(bytes.data(), static_cast<std::size_t>(got));
      if (all.size() > kLongestAnswer) no_answer("it is too long");
      if (deadline.passed())
        fail_http(Fault::timeout,
                  fmt::format("The answer did not end within {:.1f} s.", deadline.span_seconds()));
    } else if (errno == EAGAIN) {
      if (!net::wait_ready(socket.get(), POLLIN, deadline))
        fail_http(Fault::timeout,
                  fmt::format("No answer within {:.1f} s.", deadline.span_seconds()));
    } else if (errno != EINTR) {
      fail_http(Fault::peer_lost, std::strerror(errno));
    }
  }
}

}  // namespace

HttpAnswer parse_http_answer(std::string_view bytes) {
  HttpAnswer answer;
  answer.status = parse_status(next_line(bytes));
  std::optional<std::size_t> length;
  bool chunked = false;
  for (std::string_view line = next_line(bytes); !line.empty(); line = next_line(bytes)) {
    const auto colon = line.find(':');
    if (colon == std::string_view::npos) no_answer("a header has no value");
    const std::string_view name = line.substr(0, colon);
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (same_word(name, "Content-Length")) {
      const auto said = number(value, 10);
      if (!said || (length && *length != *said)) no_answer("its length is no number, or too large");
      length = said;
    } else if (same_word(name, "Transfer-Encoding")) {
      if (!same_word(value, "chunked")) no_answer("it comes in an encoding that was not asked for");
      chunked = true;
    }
  }
  if (chunked) {
    answer.body = join_chunks(bytes);
  } else {
    if (length && bytes.size() < *length) no_answer("it ends too early");
    answer.body = bytes.substr(0, length.value_or(bytes.size()));
  }
  return answer;
}

HttpAnswer http_post(const net::Address& server, const std::string& path, const std::string& json,
                     const Deadline& deadline) {
  int error = 0;
  const net::Fd socket = net::try_connect_tcp(server, deadline, error);
  if (!socket)
    fail_http(error == ETIMEDOUT ? Fault::timeout : Fault::peer_lost, std::strerror(error));
  const std::string request = fmt::format("POST {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n"
                                          "Content-Type: application/json\r\n"
                                          "Content-Length: {}\r\n\r\n{}",
                                          path, server.text(), json.size(), json);
  net::write_all(socket, std::as_bytes(std::span(request)), deadline);
  return parse_http_answer(read_until_closed(socket, deadline));
}

using Json = nlohmann::json;

namespace {

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::int64_t kLongestTtlSeconds = 3600;
constexpr std::size_t kLongestRemark = 200;

[[noreturn]] void fail_etcd(Fault fault, const std::string& explanation) {
  throw CommError({.fault = fault, .operation = "request to etcd", .explanation = explanation});
}

[[noreturn]] void not_etcd(const std::string& what) {
  fail_etcd(Fault::corrupted,
            fmt::format("What answered is no etcd of version 3.4 or later ({}).", what));
}

std::string to_base64(std::string_view bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t three = 0;
    for (std::size_t j = i; j < i + 3; ++j)
      three = three << 8 | (j < bytes.size() ? static_cast<unsigned char>(bytes[j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j)
      text += j <= bytes.size() - i ? kBase64[three >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

std::string from_base64(std::string_view text) {
  std::string bytes;
  std::uint32_t bits = 0;
  int num_bits = 0;
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  for (const char letter : text) {
    const auto digit = kBase64.find(letter);
    if (digit == std::string_view::npos) not_etcd("a value is not in base64");
    bits = (bits << 6 | static_cast<std::uint32_t>(digit)) & 0xffff;
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    bytes += static_cast<char>(bits >> num_bits & 0xff);
  }
  return bytes;
}

Json parse_json(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) not_etcd("its answer is no JSON object");
  return json;
}

// etcd sends numbers of 64 bits as strings, and leaves out those that are 0.
std::int64_t number_at(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return 0;
  std::int64_t value = -1;
  if (found->is_number_unsigned() && found->get<std::uint64_t>() <= INT64_MAX) {
    value = found->get<std::int64_t>();
  } else if (found->is_string()) {
    const auto& text = found->get_ref<const std::string&>();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) value = -1;
  }
  if (value < 0) not_etcd(fmt::format("its {} is no number", name));
  return value;
}

const Json& object_at(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_object()) not_etcd(fmt::format("it has no {}", name));
  return *found;
}

milliseconds ttl_at(const Json& object) {
  return std::chrono::seconds(std::min(number_at(object, "TTL"), kLongestTtlSeconds));
}

Etcd::Value parse_range(const Json& response) {
  const Json& range = object_at(response, "response_range");
  const auto found = range.find("kvs");
  if (found == range.end()) return {};
  if (!found->is_array() || found->size() != 1 || !found->front().is_object())
    not_etcd("a key has several values");
  const Json& entry = found->front();
  Etcd::Value value{.create_revision = number_at(entry, "create_revision"),
                    .mod_revision = number_at(entry, "mod_revision"),
                    .lease = number_at(entry, "lease")};
  if (value.create_revision == 0) not_etcd("a value has no revision");
  if (const auto text = entry.find("value"); text != entry.end()) {
    if (!text->is_string()) not_etcd("a value is no text");
    value.text = from_base64(text->get_ref<const std::string&>());
  }
  return value;
}

// etcd's error text for a message: one short line, whatever was sent.
std::string remark(const std::string& body) {
  const Json json = Json::parse(body, nullptr, false);
  std::string text = body;
  if (json.is_object() && json.contains("error") && json["error"].is_string())
    text = json["error"].get<std::string>();
  text = text.substr(0, kLongestRemark);
  std::replace_if(
      text.begin(), text.end(), [](char letter) { return letter < ' ' || letter > '~'; }, ' ');
  return text;
}

Json range_of(const std::string& key) { return {{"request_range", {{"key", to_base64(key)}}}}; }

}  // namespace

Etcd::Lease parse_granted_lease(const std::string& text) {
  const Json json = parse_json(text);
  const Etcd::Lease lease{number_at(json, "ID"), ttl_at(json)};
  if (lease.id == 0 || lease.ttl <= milliseconds(0)) not_etcd("it granted no lease");
  return lease;
}

milliseconds parse_kept_lease(const std::string& text) {
  // The gateway answers with a stream of one object.
  return ttl_at(object_at(parse_json(text), "result"));
}

Etcd::Outcome parse_outcome(const std::string& text, std::size_t num_reads) {
  const Json json = parse_json(text);
  Etcd::Outcome outcome{.revision = number_at(object_at(json, "header"), "revision")};
  const auto succeeded = json.find("succeeded");
  if (succeeded != json.end() && !succeeded->is_boolean()) not_etcd("it neither did it nor not");
  outcome.held = succeeded != json.end() && succeeded->get<bool>();
  if (num_reads == 0) return outcome;
  const auto responses = json.find("responses");
  if (responses == json.end() || !responses->is_array() || responses->size() < num_reads)
    not_etcd("it did not read all keys");
  for (std::size_t i = responses->size() - num_reads; i < responses->size(); ++i) {
    if (!(*responses)[i].is_object()) not_etcd("it did not read all keys");
    outcome.values.push_back(parse_range((*responses)[i]));
  }
  return outcome;
}

Etcd::Etcd(std::vector<net::Address> members) : members_(std::move(members)) {
  LOCKSTEP_CHECK(!members_.empty());
}

std::string Etcd::members() const {
  std::string text;
  for (const net::Address& member : members_) text += (text.empty() ? "" : " or ") + member.text();
  return text;
}

std::string Etcd::post(const std::string& path, const std::string& json, const Deadline& deadline) {
  Fault fault = Fault::timeout;
  std::string reason;
  for (std::size_t tried = 0; tried < members_.size(); ++tried) {
    const std::size_t index = (first_ + tried) % members_.size();
    // Each member gets an equal share of the time, so that a silent one leaves some for the others.
    const auto share = deadline.remaining() / static_cast<long>(members_.size() - tried);
    try {
      const HttpAnswer answer = http_post(members_[index], path, json, Deadline::after(share));
      if (answer.status == 200) {
        first_ = index;
        return answer.body;
      }
      fault = Fault::refused;
      reason = fmt::format("{} answers with status {}: {}", members_[index].text(), answer.status,
                           remark(answer.body));
      // Another member may know better only where this one has lost the cluster for the moment.
      if (answer.status < 500) break;
    } catch (const CommError& error) {
      fault = error.fault();
      reason = fmt::format("{}: {}", members_[index].text(), error.details().explanation);
    } catch (const UsageError& error) {  // the name does not resolve, at least for the moment
      fault = Fault::peer_lost;
      reason = error.what();
    }
  }
  fail_etcd(fault, reason);
}

Etcd::Lease Etcd::grant(milliseconds ttl, const Deadline& deadline) {
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(ttl).count();
  const Json json = {{"TTL", std::to_string(seconds)}};
  return parse_granted_lease(post("/v3/lease/grant", json.dump(), deadline));
}

milliseconds Etcd::keep_alive(std::int64_t lease, const Deadline& deadline) {
  const Json json = {{"ID", std::to_string(lease)}};
  return parse_kept_lease(post("/v3/lease/keepalive", json.dump(), deadline));
}

void Etcd::revoke(std::int64_t lease, const Deadline& deadline) {
  const Json json = {{"ID", std::to_string(lease)}};
  post("/v3/lease/revoke", json.dump(), deadline);
}

Etcd::Outcome Etcd::transact(const Transaction& transaction, const Deadline& deadline) {
  Json compare = Json::array(), success = Json::array(), failure = Json::array();
  for (const Transaction::Condition& condition : transaction.conditions) {
    const bool create = condition.revision == Transaction::Revision::create;
    compare.push_back(
        {{"key", to_base64(condition.key)},
         {"result", "EQUAL"},
         {"target", create ? "CREATE" : "MOD"},
         {create ? "create_revision" : "mod_revision", std::to_string(condition.equals)}});
  }
  for (const Transaction::Put& put : transaction.puts)
    success.push_back({{"request_put",
                        {{"key", to_base64(put.key)},
                         {"value", to_base64(put.text)},
                         {"lease", std::to_string(put.lease)}}}});
  for (const std::string& key : transaction.erased)
    success.push_back({{"request_delete_range", {{"key", to_base64(key)}}}});
  for (const std::string& key : transaction.reads) {
    success.push_back(range_of(key));
    failure.push_back(range_of(key));
  }
  const Json json = {{"compare", compare}, {"success", success}, {"failure", failure}};
  return parse_outcome(post("/v3/kv/txn", json.dump(), deadline), transaction.reads.size());
}

}  // namespace lockstep::launch

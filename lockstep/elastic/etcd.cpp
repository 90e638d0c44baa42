#include <lockstep/elastic/etcd.h>

#include <algorithm>
#include <array>
#include <charconv>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/elastic/http.h>

namespace lockstep::elastic {

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

// Numbers of 64 bits come as strings, and those that are 0 not at all.
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

// etcd's own words, for a message: one short line, whatever was sent.
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
  // The answer is a stream of one.
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
    // A member that is silent leaves time for the others.
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
      // Only where this member has no part in the cluster at the moment do others know better.
      if (answer.status < 500) break;
    } catch (const CommError& error) {
      fault = error.fault();
      reason = fmt::format("{}: {}", members_[index].text(), error.details().explanation);
    } catch (const UsageError& error) {  // a name that does not resolve, for the moment at least
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

}  // namespace lockstep::elastic

// The store's parser and the table behind it: the input is a series of requests, as a connection
// carries them.
#include <algorithm>
#include <vector>

#include <lockstep/store/table.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

using namespace lockstep::store;

constexpr std::size_t kCapacity = 64 << 10;

void check_round_trip(const Request& request, std::span<const std::byte> body) {
  const auto again = encode(request);
  const auto whole = std::span(again).subspan(kSizeBytes);
  require(std::ranges::equal(whole, body), "a request has one encoding");
}

void check_reply(std::span<const std::byte> body) {
  const auto reply = parse_reply(body);
  if (!reply) return;
  const auto again = encode(*reply);
  require(std::ranges::equal(std::span(again).subspan(kSizeBytes), body),
          "a reply has one encoding");
}

}  // namespace

void run(std::span<const std::byte> input) {
  check_reply(input);
  Table table(kCapacity);
  const auto start = Clock::now();
  Ticket ticket = 0;
  std::size_t num_open = 0;
  while (input.size() >= kSizeBytes) {
    const auto size = parse_size(input.first<kSizeBytes>(), kLongestRequest);
    input = input.subspan(kSizeBytes);
    if (!size || *size > input.size()) break;
    const auto body = input.first(*size);
    input = input.subspan(*size);
    auto request = parse_request(body);
    if (!request) continue;
    check_round_trip(*request, body);
    std::vector<Answer> answers;
    ++num_open;
    // Two clients take turns, with a connection of its own for each request.
    const char* client = ticket % 2 == 0 ? "even" : "odd";
    table.apply(++ticket, client, std::move(*request), start, answers);
    if (answers.empty() && table.num_waiting() < num_open) --num_open;  // a stale repeat
    require(answers.size() <= num_open, "one answer for each request at most");
    num_open -= answers.size();
    require(table.num_waiting() == num_open, "who has no answer waits");
    require(table.held_bytes() <= kCapacity, "the store holds no more than it may");
    for (const Answer& answer : answers) encode(answer.reply);
  }
  std::vector<Answer> answers;
  table.expire(start + std::chrono::hours(24 * 365 * 150), answers);
  require(answers.size() == num_open && table.num_waiting() == 0, "every wait ends");
}

}  // namespace lockstep::fuzz

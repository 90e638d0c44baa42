#include <lockstep/comm/transport/link.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm {

namespace {

constexpr std::size_t kMostRanks = 64;
constexpr std::size_t kLongestOperation = 64;

struct Header {
  std::uint64_t sequence;
  std::int32_t found_by;
  std::uint16_t fault;
  std::uint16_t num_ranks;
  std::uint16_t operation_bytes;
  std::uint16_t explanation_bytes;
  std::uint32_t reserved;
};
static_assert(sizeof(Header) == 24);

}  // namespace

Notice Notice::from(const CommError& error, int found_by) {
  const auto& details = error.details();
  return {.fault = details.fault,
          .found_by = details.found_by >= 0 ? details.found_by : found_by,
          .sequence = details.sequence,
          .operation = details.operation,
          .ranks = details.ranks,
          .explanation = details.explanation};
}

CommError Notice::error(const std::string& group, int rank) const {
  return CommError({.fault = fault,
                    .operation = operation,
                    .group = group,
                    .sequence = sequence,
                    .ranks = ranks,
                    .explanation = explanation,
                    .found_by = found_by == rank ? -1 : found_by});
}

std::vector<std::byte> Notice::encode() const {
  const std::size_t num_ranks = std::min(ranks.size(), kMostRanks);
  const std::size_t operation_bytes = std::min(operation.size(), kLongestOperation);
  const std::size_t room =
      kMostBytes - sizeof(Header) - num_ranks * sizeof(std::int32_t) - operation_bytes;
  const std::size_t explanation_bytes = std::min(explanation.size(), room);
  const Header header{.sequence = sequence,
                      .found_by = found_by,
                      .fault = static_cast<std::uint16_t>(fault),
                      .num_ranks = static_cast<std::uint16_t>(num_ranks),
                      .operation_bytes = static_cast<std::uint16_t>(operation_bytes),
                      .explanation_bytes = static_cast<std::uint16_t>(explanation_bytes),
                      .reserved = 0};
  std::vector<std::byte> bytes;
  const auto append = [&bytes](const void* from, std::size_t size) {
    const auto* begin = static_cast<const std::byte*>(from);
    bytes.insert(bytes.end(), begin, begin + size);
  };
  append(&header, sizeof(header));
  for (std::size_t i = 0; i < num_ranks; ++i) {
    const std::int32_t rank = ranks[i];
    append(&rank, sizeof(rank));
  }
  append(operation.data(), operation_bytes);
  append(explanation.data(), explanation_bytes);
  return bytes;
}

Notice Notice::decode(std::span<const std::byte> bytes) {
  Notice notice;
  notice.operation = "communication";
  notice.explanation = "Another rank ended the group.";
  Header header;
  if (bytes.size() < sizeof(header) || bytes.size() > kMostBytes) return notice;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const std::size_t size = sizeof(header) + header.num_ranks * sizeof(std::int32_t) +
                           header.operation_bytes + header.explanation_bytes;
  if (size != bytes.size() || header.num_ranks > kMostRanks ||
      header.operation_bytes > kLongestOperation || header.reserved != 0 ||
      header.fault > static_cast<std::uint16_t>(Fault::engine) || header.found_by < 0)
    return notice;
  notice.fault = static_cast<Fault>(header.fault);
  notice.found_by = header.found_by;
  notice.sequence = header.sequence;
  const std::byte* at = bytes.data() + sizeof(header);
  for (std::size_t i = 0; i < header.num_ranks; ++i, at += sizeof(std::int32_t)) {
    std::int32_t rank = 0;
    std::memcpy(&rank, at, sizeof(rank));
    notice.ranks.push_back(rank);
  }
  notice.operation.assign(reinterpret_cast<const char*>(at), header.operation_bytes);
  at += header.operation_bytes;
  notice.explanation.assign(reinterpret_cast<const char*>(at), header.explanation_bytes);
  return notice;
}

void Link::check_message(const Fingerprint& mine, std::size_t my_bytes, const Fingerprint& theirs,
                         std::size_t their_bytes) const {
  if (mine == theirs && my_bytes == their_bytes) [[likely]]
    return;
  std::string text;
  if (mine == theirs) {
    text = fmt::format("In {} rank {} sends {} bytes where rank {} expects {}.", mine.text(), peer_,
                       their_bytes, self_, my_bytes);
  } else if (mine.generation != theirs.generation) {
    text = fmt::format("Rank {} is in generation {} of the group, rank {} in {}.", peer_,
                       theirs.generation, self_, mine.generation);
  } else {
    // A caller that gives subjects knows what their numbers mean; another one could not say.
    const std::string ours = mine.text_with_subject();
    const bool has_subject = ours != mine.text();
    text = fmt::format("Rank {} called {}, but rank {} called {}.", self_, ours, peer_,
                       has_subject ? theirs.text_with_subject() : theirs.text());
  }
  throw CommError(
      {.fault = Fault::mismatch,
       .operation = name(mine.operation),
       .group = {},
       .sequence = mine.sequence,
       .ranks = self_ < peer_ ? std::vector<int>{self_, peer_} : std::vector<int>{peer_, self_},
       .explanation = text});
}

}  // namespace lockstep::comm

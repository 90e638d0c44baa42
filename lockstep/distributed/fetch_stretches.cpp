#include <lockstep/distributed/fetch_stretches.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

constexpr std::int64_t kLeastAtOnce = 1 << 16;

std::int64_t total_bytes(const std::vector<BlockStretch>& stretches) {
  std::int64_t total = 0;
  for (const BlockStretch& stretch : stretches) total += stretch.bytes;
  return total;
}

// Walks through stretches as through one row of bytes, some at a time.
class Walk {
 public:
  explicit Walk(const std::vector<BlockStretch>& stretches)
      : stretches_(&stretches), left_(total_bytes(stretches)) {}

  std::int64_t left() const { return left_; }

  // Calls visit(index, before, bytes, at) for what the next bytes are of: of which stretch, from
  // where on, how many, and how many of these went before.
  template <typename Visit>
  void next(std::int64_t bytes, const Visit& visit) {
    for (std::int64_t at = 0; at < bytes;) {
      const std::int64_t rest = (*stretches_)[index_].bytes - before_;
      const std::int64_t count = std::min(rest, bytes - at);
      if (count > 0) visit(index_, before_, count, at);
      at += count;
      before_ += count;
      left_ -= count;
      if (before_ == (*stretches_)[index_].bytes) {
        ++index_;
        before_ = 0;
      }
    }
  }

 private:
  const std::vector<BlockStretch>* stretches_;
  std::int64_t left_;
  std::size_t index_ = 0;
  std::int64_t before_ = 0;
};

std::vector<std::vector<BlockStretch>> tell_wishes(
    const RankMessages& ranks, const std::vector<std::vector<BlockStretch>>& wanted) {
  std::vector<std::vector<std::int64_t>> numbers;
  for (const std::vector<BlockStretch>& of_rank : wanted) {
    std::vector<std::int64_t>& list = numbers.emplace_back();
    for (const BlockStretch& one : of_rank)
      list.insert(list.end(), {one.block, one.offset, one.bytes});
  }
  std::vector<std::vector<BlockStretch>> asked;
  for (const std::vector<std::int64_t>& list : ranks.deal(numbers)) {
    std::vector<BlockStretch>& of_rank = asked.emplace_back();
    for (std::size_t i = 0; i + 2 < list.size(); i += 3)
      of_rank.push_back({list[i], list[i + 1], list[i + 2]});
  }
  return asked;
}

// The same on all ranks: what two of them send at once is for both to know.
std::int64_t bytes_of_one_message(const RankMessages& ranks,
                                  const std::vector<std::vector<BlockStretch>>& wanted,
                                  const std::vector<std::vector<BlockStretch>>& asked,
                                  std::int64_t bytes_at_once) {
  const auto busy = [](const std::vector<BlockStretch>& stretches) {
    return total_bytes(stretches) > 0;
  };
  const auto mine =
      std::max(std::ranges::count_if(wanted, busy), std::ranges::count_if(asked, busy));
  std::int64_t most = 1;
  for (const std::string& text : ranks.gather(std::to_string(mine)))
    most = std::max<std::int64_t>(most, std::stoll(text));
  return std::max(kLeastAtOnce, bytes_at_once / most);
}

}  // namespace

void fetch_stretches(const RankMessages& ranks,
                     const std::vector<std::vector<BlockStretch>>& wanted,
                     const std::function<std::span<const std::byte>(std::int64_t block)>& held,
                     const std::function<void(int rank, std::size_t index, std::int64_t before,
                                              std::span<const std::byte> bytes)>& take,
                     const FetchOptions& options) {
  const auto asked = tell_wishes(ranks, wanted);
  const std::int64_t message = bytes_of_one_message(ranks, wanted, asked, options.bytes_at_once);
  std::vector<Walk> sends(asked.begin(), asked.end());
  std::vector<Walk> receives(wanted.begin(), wanted.end());
  while (true) {
    // Message k between two ranks is in round k of both, so that nobody waits in a circle.
    std::vector<comm::Transfer> transfers;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      Walk& walk = sends[static_cast<std::size_t>(rank)];
      const std::int64_t bytes = std::min(message, walk.left());
      if (bytes == 0) continue;
      const at::Tensor packed = at::empty({bytes}, at::kByte);
      auto* const to = static_cast<std::byte*>(packed.data_ptr());
      walk.next(bytes, [&](std::size_t index, std::int64_t before, std::int64_t count,
                           std::int64_t at) {
        const BlockStretch& one = asked[static_cast<std::size_t>(rank)][index];
        const auto block = held(one.block);
        LOCKSTEP_CHECK(one.offset >= 0 && one.bytes >= 0 &&
                           one.offset + one.bytes <= static_cast<std::int64_t>(block.size()),
                       "rank {} asks for bytes {} to {} of {}", rank, one.offset,
                       one.offset + one.bytes, block.size());
        std::memcpy(to + at, block.data() + one.offset + before, static_cast<std::size_t>(count));
      });
      transfers.push_back(comm::send_to(rank, packed));
    }
    std::vector<std::pair<int, at::Tensor>> coming;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const std::int64_t bytes = std::min(message, receives[static_cast<std::size_t>(rank)].left());
      if (bytes == 0) continue;
      coming.emplace_back(rank, at::empty({bytes}, at::kByte));
      transfers.push_back(comm::receive_from(rank, coming.back().second));
    }
    if (transfers.empty()) return;
    ranks.exchange(transfers);
    for (const auto& [rank, packed] : coming) {
      const auto* const from = static_cast<const std::byte*>(packed.data_ptr());
      const int source = rank;
      receives[static_cast<std::size_t>(rank)].next(
          packed.numel(),
          [&](std::size_t index, std::int64_t before, std::int64_t count, std::int64_t at) {
            take(source, index, before, {from + at, static_cast<std::size_t>(count)});
          });
    }
  }
}

}  // namespace lockstep

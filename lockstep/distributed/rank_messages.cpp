#include <lockstep/distributed/rank_messages.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>

namespace lockstep {

namespace {

// Memory of its own: a call that fails may leave it to others for a while.
at::Tensor copy_of(const at::Tensor& host) { return host.clone(); }

at::Tensor bytes_in(std::string& text) {
  return at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte);
}

}  // namespace

std::string RankMessages::broadcast(const std::string& text) const {
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group_->broadcast(size, 0).wait();
  std::string received(static_cast<std::size_t>(size.item<std::int64_t>()), '\0');
  if (is_first()) received = text;
  if (received.empty()) return received;
  const at::Tensor bytes = copy_of(bytes_in(received));
  group_->broadcast(bytes, 0).wait();
  bytes_in(received).copy_(bytes);
  return received;
}

std::vector<std::string> RankMessages::gather(const std::string& text) const {
  const auto lengths = at::empty({size()}, at::kLong);
  group_
      ->all_gather(lengths,
                   at::full({1}, static_cast<std::int64_t>(text.size()), lengths.options()))
      .wait();
  const at::Tensor sizes = lengths.cpu();
  std::vector<at::Tensor> bytes;
  for (int rank = 0; rank < size(); ++rank)
    bytes.push_back(at::empty({sizes[rank].item<std::int64_t>()}, at::kByte));
  std::string mine = text;
  group_->all_gather(bytes, copy_of(bytes_in(mine))).wait();
  std::vector<std::string> texts;
  for (const at::Tensor& one : bytes) {
    std::string& received = texts.emplace_back(static_cast<std::size_t>(one.numel()), '\0');
    if (!received.empty()) bytes_in(received).copy_(one);
  }
  return texts;
}

std::vector<double> RankMessages::sum(std::vector<double> values) const {
  const at::Tensor host =
      at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
  const at::Tensor totals = copy_of(host);
  group_->all_reduce(totals).wait();
  host.copy_(totals);
  return values;
}

std::vector<std::vector<std::int64_t>> RankMessages::deal(
    const std::vector<std::vector<std::int64_t>>& numbers) const {
  const auto options = at::kLong;
  std::vector<std::int64_t> lengths;
  std::vector<at::Tensor> sent;
  for (const std::vector<std::int64_t>& list : numbers) {
    lengths.push_back(static_cast<std::int64_t>(list.size()));
    sent.push_back(copy_of(at::tensor(list, at::kLong)));
  }
  const at::Tensor coming = at::empty({size()}, options);
  group_->all_to_all(coming, copy_of(at::tensor(lengths, at::kLong))).wait();
  const at::Tensor sizes = coming.cpu();
  std::vector<at::Tensor> received;
  for (int rank = 0; rank < size(); ++rank)
    received.push_back(at::empty({sizes[rank].item<std::int64_t>()}, options));
  group_->all_to_all(received, sent).wait();
  std::vector<std::vector<std::int64_t>> dealt;
  for (const at::Tensor& one : received) {
    const at::Tensor here = one.cpu();
    const auto* const first = static_cast<const std::int64_t*>(here.data_ptr());
    dealt.emplace_back(first, first + here.numel());
  }
  return dealt;
}

void RankMessages::exchange(const std::vector<comm::Transfer>& transfers) const {
  group_->exchange(transfers).wait_on_host();
}

namespace {

// Lines of the one that the other has not.
std::string lines_missing(const std::vector<std::string>& of, const std::vector<std::string>& in) {
  std::vector<std::string> missing;
  std::ranges::copy_if(of, std::back_inserter(missing), [&](const std::string& line) {
    return std::ranges::find(in, line) == in.end();
  });
  constexpr std::size_t kMostShown = 8;
  const std::size_t more = missing.size() - std::min(missing.size(), kMostShown);
  missing.resize(missing.size() - more);
  if (missing.empty()) return "nothing of the kind";
  return fmt::format("{}{}", fmt::join(missing, "; "),
                     more > 0 ? fmt::format("; and {} more", more) : "");
}

}  // namespace

void check_told_the_same(const std::vector<std::string>& lines, const RankMessages& ranks) {
  if (ranks.size() == 1) return;
  const auto found = data_parallel::first_difference(lines, *ranks.group());
  if (!found) return;
  const auto all = data_parallel::gather_lines(lines, *ranks.group());
  const auto& first = all.front();
  const auto& other = all[static_cast<std::size_t>(found->rank)];
  throw UsageError("ranks were told different things, and would not train the same model.\n"
                   "  rank 0: {}\n  rank {}: {}\n"
                   "Start every rank with the same program, config and data; on several hosts, "
                   "look for a file that one of them has an older copy of",
                   lines_missing(first, other), found->rank, lines_missing(other, first));
}

}  // namespace lockstep

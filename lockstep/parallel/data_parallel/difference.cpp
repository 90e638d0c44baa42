#include <lockstep/parallel/data_parallel/difference.h>

#include <cstring>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

namespace lockstep::data_parallel {

namespace {

std::string line_or_nothing(const std::vector<std::string>& lines, std::size_t index) {
  return index < lines.size() ? lines[index] : "nothing";
}

}  // namespace

at::Tensor gather_numbers(std::int64_t number, comm::Communicator& group) {
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, number, at::kLong)).wait();
  return all;
}

std::vector<std::vector<std::string>> gather_lines(const std::vector<std::string>& lines,
                                                   comm::Communicator& group) {
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  const at::Tensor lengths = gather_numbers(static_cast<std::int64_t>(text.size()), group);
  const at::Tensor mine = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> texts;
  for (int rank = 0; rank < group.size(); ++rank)
    texts.push_back(at::empty({lengths[rank].item<std::int64_t>()}, at::kByte));
  group.all_gather(texts, mine).wait();
  std::vector<std::vector<std::string>> all;
  for (const at::Tensor& bytes : texts) {
    std::string rest(static_cast<const char*>(bytes.data_ptr()),
                     static_cast<std::size_t>(bytes.numel()));
    std::vector<std::string>& lines_of_rank = all.emplace_back();
    for (std::size_t end = 0; !rest.empty(); rest.erase(0, end == rest.npos ? end : end + 1)) {
      end = rest.find('\n');
      lines_of_rank.push_back(rest.substr(0, end));
    }
  }
  return all;
}

std::optional<Difference> first_difference(const std::vector<std::string>& lines,
                                           comm::Communicator& group) {
  const auto hash = static_cast<std::int64_t>(hash_text(fmt::format("{}", fmt::join(lines, "\n"))));
  const at::Tensor hashes = gather_numbers(hash, group);
  if (hashes.eq(hashes[0]).all().item<bool>()) return std::nullopt;
  const auto all = gather_lines(lines, group);
  for (int rank = 1; rank < group.size(); ++rank) {
    const auto& first = all[0];
    const auto& other = all[static_cast<std::size_t>(rank)];
    if (other == first) continue;
    std::size_t place = 0;
    while (line_or_nothing(first, place) == line_or_nothing(other, place)) ++place;
    return Difference{
        rank,         place,       line_or_nothing(first, place), line_or_nothing(other, place),
        first.size(), other.size()};
  }
  LOCKSTEP_CHECK(false, "hashes differ where the lines do not");
}

}  // namespace lockstep::data_parallel

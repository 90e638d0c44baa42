#include <cli/torch/check/report.h>

#include <algorithm>
#include <cstring>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::cli::inspection {

bool Report::can_train() const {
  return std::none_of(problems.begin(), problems.end(),
                      [](const Problem& problem) { return problem.prevents_training; });
}

std::vector<Host> merge_hosts(const std::vector<Rank>& ranks, const std::vector<Host>& described) {
  std::vector<Host> hosts;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto host = std::find_if(hosts.begin(), hosts.end(),
                             [&](const Host& one) { return one.id == ranks[i].host_id; });
    if (host == hosts.end()) host = hosts.insert(hosts.end(), described[i]);
    host->ranks.push_back(ranks[i].rank);
  }
  // A pinned rank knows only its own cores.
  for (Host& host : hosts) {
    std::set<int> cpus;
    for (const Rank& rank : ranks)
      if (rank.host_id == host.id) cpus.insert(rank.cpus.begin(), rank.cpus.end());
    host.num_cores = static_cast<int>(cpus.size());
    if (host.cpu_quota >= 0)
      host.num_cores = std::clamp(static_cast<int>(host.cpu_quota), 1, host.num_cores);
  }
  return hosts;
}

std::vector<std::string> gather_texts(comm::Communicator& world, const std::string& text) {
  at::Tensor lengths = at::empty({world.size()}, at::kLong);
  world.all_gather(lengths, at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong))
      .wait_on_host();
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size(); ++rank)
    all.push_back(at::empty({lengths[rank].item<std::int64_t>()}, at::kByte));
  world.all_gather(all, bytes).wait_on_host();

  std::vector<std::string> texts;
  for (const at::Tensor& one : all)
    texts.emplace_back(static_cast<const char*>(one.data_ptr()),
                       static_cast<std::size_t>(one.numel()));
  return texts;
}

}  // namespace lockstep::cli::inspection

#include <cli/torch/check/gather.h>

#include <cstring>

#include <ATen/ATen.h>

namespace lockstep::cli::inspection {

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

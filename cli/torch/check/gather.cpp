#include <cli/torch/check/gather.h>

#include <cstring>

#include <ATen/ATen.h>

namespace lockstep::cli::inspection {

std::vector<std::string> gather_texts(comm::Communicator& world, const std::string& text,
                                      at::DeviceType device) {
  const auto options = at::device(device);
  const at::Tensor length =
      at::full({1}, static_cast<std::int64_t>(text.size()), options.dtype(at::kLong));
  at::Tensor lengths = at::empty({world.size()}, options.dtype(at::kLong));
  world.all_gather(lengths, length).wait_on_host();
  lengths = lengths.to(at::kCPU);

  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size(); ++rank)
    all.push_back(at::empty({lengths[rank].item<std::int64_t>()}, options.dtype(at::kByte)));
  world.all_gather(all, bytes.to(device)).wait_on_host();

  std::vector<std::string> texts;
  for (const at::Tensor& one : all) {
    const at::Tensor here = one.to(at::kCPU);
    texts.emplace_back(static_cast<const char*>(here.data_ptr()),
                       static_cast<std::size_t>(here.numel()));
  }
  return texts;
}

}  // namespace lockstep::cli::inspection

#include <lockstep/recompute/block_list.h>

namespace lockstep {

std::shared_ptr<torch::nn::Module> BlockListImpl::clone(
    const torch::optional<torch::Device>& device) const {
  auto copy = std::make_shared<BlockListImpl>(snapshot_);
  for (const auto& block : *this) copy->push_back(block->clone(device));
  copy->recomputed_ = recomputed_;
  return copy;
}

void BlockListImpl::pretty_print(std::ostream& stream) const { stream << "lockstep::BlockList"; }

}  // namespace lockstep

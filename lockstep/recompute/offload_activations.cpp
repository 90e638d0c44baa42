#include <lockstep/recompute/offload_activations.h>

#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/recompute/saved_tensor.h>

namespace lockstep {

using activations::HostCopies;
using activations::HostCopy;
using activations::KeptTensor;
using activations::View;

namespace {

// The whole storage is copied, which pays only if the tensor is a large enough part of it.
constexpr std::size_t kLargestShare = 4;

bool is_worth_moving(const at::Tensor& tensor, const OffloadOptions& options) {
  if (!tensor.is_cuda() || tensor.layout() != at::kStrided || activations::is_parameter(tensor))
    return false;
  if (tensor.is_conj() || tensor.is_neg()) return false;
  const std::size_t bytes = tensor.nbytes();
  return bytes >= options.min_bytes && tensor.storage().nbytes() <= kLargestShare * bytes;
}

class SavedOnHost : public torch::autograd::SavedVariableHooks {
 public:
  SavedOnHost(HostCopies& copies, const OffloadOptions& options)
      : copies_(copies), options_(options) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    if (is_worth_moving(tensor, options_)) {
      view_.emplace(tensor);
      copy_ = copies_.of(tensor);
    } else {
      kept_ = KeptTensor(tensor);
    }
  }

  at::Tensor call_unpack_hook() override { return copy_ ? copy_->back(*view_) : kept_.checked(); }

 private:
  HostCopies& copies_;             // valid while tensors are packed
  const OffloadOptions& options_;  // valid while tensors are packed
  std::shared_ptr<HostCopy> copy_;
  std::optional<View> view_;
  KeptTensor kept_;
};

}  // namespace

class OffloadActivations::Hooks : public intercept::SavedTensorHooks {
 public:
  explicit Hooks(const OffloadOptions& options) : options_(options) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override {
    return std::make_unique<SavedOnHost>(copies_, options_);
  }

 private:
  OffloadOptions options_;
  HostCopies copies_;
};

OffloadActivations::OffloadActivations(const OffloadOptions& options)
    : hooks_(std::make_unique<Hooks>(options)), scope_(*hooks_) {}

OffloadActivations::~OffloadActivations() = default;

}  // namespace lockstep

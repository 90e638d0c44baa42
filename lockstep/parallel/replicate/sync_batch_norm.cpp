#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include <algorithm>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/parallel/replicate/batch_norm_owner.h>

namespace lockstep::replicate {

// Before every backward pass.
class SyncBatchNorm::Watch final : public intercept::PassListener {
 public:
  explicit Watch(const SyncBatchNorm& norms) : norms_(norms) {}
  void before_pass() override { norms_.check_redirected(); }

 private:
  const SyncBatchNorm& norms_;
};

SyncBatchNorm::SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group) {
  check_batch_norms_can_be_redirected();
  sum_ = std::make_shared<const SumOverRanks>(
      [own = group.split(0, group.rank(), "sync_batch_norm")](const at::Tensor& sums) {
        own->all_reduce(sums).wait();
      });
  for (const auto& item : module.named_modules()) {
    if (converted(*item.value())) continue;
    if (auto owner = redirect_batch_norm(item.value(), item.key(), sum_))
      norms_.push_back({item.value(), item.key(), std::move(owner)});
  }
  watch_ = std::make_shared<Watch>(*this);
  intercept::add_pass_listener(watch_);
}

void SyncBatchNorm::check_redirected() const {
  for (const Converted& norm : norms_)
    if (const auto module = norm.module.lock();
        module != nullptr && module->is_training() && !leads_to(*module, *norm.owner))
      throw UsageError(
          "the batch norm '{}' was loaded or converted after convert_sync_batchnorm(), "
          "as torch::load() and to() do, so that its statistics are those of this "
          "rank's samples alone: load and convert the model before wrap_model()",
          norm.name);
}

bool SyncBatchNorm::converted(const torch::nn::Module& norm) const {
  return std::ranges::any_of(norms_,
                             [&](const auto& known) { return known.module.lock().get() == &norm; });
}

bool SyncBatchNorm::converted_any_of(const torch::nn::Module& module) const {
  return converted(module) ||
         std::ranges::any_of(module.modules(/*include_self=*/false),
                             [&](const auto& inner) { return converted(*inner); });
}

void SyncBatchNorm::renew() {
  for (Converted& norm : norms_)
    if (const auto module = norm.module.lock())
      norm.owner = redirect_batch_norm(module, norm.name, sum_);
}

bool SyncBatchNorm::expired() const {
  return std::ranges::all_of(norms_, [](const auto& norm) { return norm.module.expired(); });
}

}  // namespace lockstep::replicate

#include <lockstep/recompute/recomputed_any_module.h>

#include <memory>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/any.h>

#include <lockstep/recompute/recompute.h>

namespace lockstep::activations {

namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;
using Holder = torch::nn::AnyModulePlaceholder;

// Stands between an AnyModule and the holder that knows its module's type.
class RecomputedModule : public Holder {
 public:
  explicit RecomputedModule(std::shared_ptr<Holder> inner)
      : Holder(typeid(RecomputedModule)), inner_(std::move(inner)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    // Tensors are found in the types that modules commonly take.
    std::vector<at::Tensor> tensors;
    std::vector<std::vector<at::Tensor>> lists;
    for (AnyValue& argument : arguments) {
      if (auto* tensor = argument.try_get<at::Tensor>()) tensors.push_back(std::move(*tensor));
      if (auto* list = argument.try_get<std::vector<at::Tensor>>())
        lists.push_back(std::move(*list));
    }
    auto call = [inner = inner_, arguments](const std::vector<at::Tensor>& tensors,
                                            const std::vector<std::vector<at::Tensor>>& lists) {
      auto filled = arguments;
      auto tensor = tensors.begin();
      auto list = lists.begin();
      for (AnyValue& argument : filled) {
        if (auto* gap = argument.try_get<at::Tensor>()) *gap = *tensor++;
        if (auto* gap = argument.try_get<std::vector<at::Tensor>>()) *gap = *list++;
      }
      return inner->forward(std::move(filled));
    };
    return recompute_in({.buffers = inner_->ptr()->buffers()}, std::move(call), tensors, lists);
  }

  std::shared_ptr<torch::nn::Module> ptr() override { return inner_->ptr(); }

  std::unique_ptr<Holder> copy() const override {
    return std::make_unique<RecomputedModule>(inner_->copy());
  }

  std::unique_ptr<Holder> clone_module(torch::optional<torch::Device> device) const override {
    return std::make_unique<RecomputedModule>(inner_->clone_module(device));
  }

 private:
  std::shared_ptr<Holder> inner_;
};

// An AnyModule takes no holder but those it makes itself, which call their module at once. What it
// holds is private; C++ lets an explicit instantiation name it all the same.
using Content = std::unique_ptr<Holder> AnyModule::*;
Content content();
template <Content kMember>
struct Opened {
  friend Content content() { return kMember; }
};
template struct Opened<&AnyModule::content_>;

}  // namespace

void set_recomputed(AnyModule& module) {
  std::unique_ptr<Holder>& holder = module.*content();
  if (holder == nullptr || dynamic_cast<RecomputedModule*>(holder.get()) != nullptr) return;
  holder = std::make_unique<RecomputedModule>(std::move(holder));
}

}  // namespace lockstep::activations

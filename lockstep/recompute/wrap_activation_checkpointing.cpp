#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/base/error.h>
#include <lockstep/base/even_share.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep {

namespace {

// A module, and how code reaches it to call it.
struct BlockPlace {
  std::string name;  // the module's name in the model
  std::shared_ptr<torch::nn::Module> module;
  // Makes the module be recomputed from now on. Empty if the code that calls it cannot be reached.
  std::function<void()> set_recomputed;
};

using torch::nn::AnyModule;
using torch::nn::AnyValue;
using Holder = torch::nn::AnyModulePlaceholder;

// Stands between an AnyModule and the holder that knows its module's type.
class RecomputedModule : public Holder {
 public:
  explicit RecomputedModule(std::shared_ptr<Holder> inner)
      : Holder(typeid(RecomputedModule)), inner_(std::move(inner)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    // Finds tensors in the two types of arguments that modules commonly take.
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
    return activations::recompute_in({.buffers = inner_->ptr()->buffers()}, std::move(call),
                                     tensors, lists);
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

// An AnyModule takes only holders that it makes itself, which call their module directly. Its
// holder is a private member; C++ lets an explicit instantiation name private members.
using Content = std::unique_ptr<Holder> AnyModule::*;
Content content();
template <Content kMember>
struct Opened {
  friend Content content() { return kMember; }
};
template struct Opened<&AnyModule::content_>;

// Makes the module in this AnyModule be recomputed when it is called through it, whatever its
// arguments and result. A second call changes nothing.
void set_recomputed(AnyModule& module) {
  std::unique_ptr<Holder>& holder = module.*content();
  if (holder == nullptr || dynamic_cast<RecomputedModule*>(holder.get()) != nullptr) return;
  holder = std::make_unique<RecomputedModule>(std::move(holder));
}

using torch::nn::Module;

// The children in the order of registration, which is the order of a list's elements.
std::vector<BlockPlace> children_of(Module& parent, const std::string& prefix) {
  std::vector<BlockPlace> places;
  auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&parent);
  auto* const list = dynamic_cast<BlockListImpl*>(&parent);
  for (const auto& child : parent.named_children()) {
    const std::size_t index = places.size();
    std::function<void()> set;
    if (sequential != nullptr)
      set = [sequential, index] {
        set_recomputed(*(sequential->begin() + static_cast<std::ptrdiff_t>(index)));
      };
    else if (list != nullptr)
      set = [list, index] { list->set_recomputed(index); };
    places.push_back({prefix + child.key(), child.value(), std::move(set)});
  }
  return places;
}

bool is_list(const Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr;
}

// A block has modules of its own: recomputing a single layer saves nothing. One that is spread over
// ranks may have a child that is not its own, without parameters.
bool repeats(const BlockPlace& place, const std::vector<BlockPlace>& siblings) {
  const Module& module = *place.module;
  const bool is_block = std::ranges::any_of(
      module.children(), [](const auto& child) { return !child->parameters().empty(); });
  return is_block && std::ranges::count_if(siblings, [&](const auto& sibling) {
                       const Module& other = *sibling.module;
                       return typeid(other) == typeid(module);
                     }) > 1;
}

void add_repeated(Module& parent, const std::string& prefix, std::vector<BlockPlace>& blocks) {
  const auto children = children_of(parent, prefix);
  for (const BlockPlace& child : children) {
    if (is_list(parent) && repeats(child, children))
      blocks.push_back(child);
    else
      add_repeated(*child.module, child.name + ".", blocks);
  }
}

void add_all(Module& parent, const std::string& prefix, std::vector<BlockPlace>& places) {
  for (BlockPlace& child : children_of(parent, prefix)) {
    const auto module = child.module;
    const std::string below = child.name + ".";
    places.push_back(std::move(child));
    add_all(*module, below, places);
  }
}

// All modules below the model, each after the one that holds it. They refer to the model.
std::vector<BlockPlace> places_in(Module& model) {
  std::vector<BlockPlace> places;
  add_all(model, "", places);
  return places;
}

// The elements of lists that have modules of their own, if several in the list have one type.
// Blocks inside a block are left out.
std::vector<BlockPlace> repeated_blocks(Module& model) {
  std::vector<BlockPlace> blocks;
  add_repeated(model, "", blocks);
  return blocks;
}

// Makes all of them be recomputed, or throws and changes none.
void set_recomputed(const std::vector<BlockPlace>& places) {
  for (const auto& place : places)
    if (!place.set_recomputed)
      throw UsageError(
          "'{}' cannot be recomputed from outside the model, since nothing comes between its "
          "forward and the code that calls it. In that code, write lockstep::recompute(block, x) "
          "for block->forward(x), or hold the blocks in a lockstep::BlockList in place of a "
          "ModuleList and write blocks->call<Block>(i, x)",
          place.name);
  for (const auto& place : places) place.set_recomputed();
}

}  // namespace

std::shared_ptr<torch::nn::Module> BlockListImpl::clone(
    const torch::optional<torch::Device>& device) const {
  auto copy = std::make_shared<BlockListImpl>(snapshot_);
  for (const auto& block : *this) copy->push_back(block->clone(device));
  copy->recomputed_ = recomputed_;
  return copy;
}

void BlockListImpl::pretty_print(std::ostream& stream) const { stream << "lockstep::BlockList"; }

std::size_t wrap_activation_checkpointing(torch::nn::Module& model,
                                          const activations::Policy& policy) {
  if (policy.every == 0)
    throw UsageError("a policy of activation checkpointing names every 0th block: give at least 1");
  std::size_t num_blocks = 0;
  std::vector<BlockPlace> chosen;
  for (auto& place : places_in(model))
    if (policy.is_block(place.name, *place.module) && ++num_blocks % policy.every == 0)
      chosen.push_back(std::move(place));
  if (chosen.empty())
    throw UsageError(
        "activation checkpointing would recompute nothing: {} of the modules below the model are "
        "blocks by the policy, and every {} of them is recomputed",
        num_blocks, policy.every);
  set_recomputed(chosen);
  return chosen.size();
}

SelectiveGradientCheckpointing::SelectiveGradientCheckpointing(torch::nn::Module& model,
                                                               double ratio) {
  if (!(ratio >= 0.0 && ratio <= 1.0))
    throw UsageError("the share of blocks to recompute is {}: give a number from 0 to 1", ratio);
  const auto blocks = repeated_blocks(model);
  if (blocks.empty())
    throw UsageError(
        "the model has no Sequential, ModuleList or BlockList with several blocks of one type: say "
        "what its blocks are, by wrap_activation_checkpointing(model, policy)");
  num_blocks_ = blocks.size();
  num_recomputed_ = num_in_share(num_blocks_, ratio);
  std::vector<BlockPlace> chosen;
  for (std::size_t i = 0; i < num_blocks_; ++i)
    if (is_in_share(i, num_blocks_, ratio)) chosen.push_back(blocks[i]);
  set_recomputed(chosen);
}

}  // namespace lockstep

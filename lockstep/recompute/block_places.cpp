#include <lockstep/recompute/block_places.h>

#include <algorithm>
#include <typeinfo>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/recompute/block_list.h>
#include <lockstep/recompute/recomputed_any_module.h>

namespace lockstep::activations {

namespace {

using torch::nn::Module;

// In the order of registration, which is that of a list's elements.
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

// A block is more than a layer: recomputing a single one saves nothing.
bool repeats(const BlockPlace& place, const std::vector<BlockPlace>& siblings) {
  const Module& module = *place.module;
  return !module.children().empty() && std::ranges::count_if(siblings, [&](const auto& sibling) {
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

}  // namespace

std::vector<BlockPlace> places_in(Module& model) {
  std::vector<BlockPlace> places;
  add_all(model, "", places);
  return places;
}

std::vector<BlockPlace> repeated_blocks(Module& model) {
  std::vector<BlockPlace> blocks;
  add_repeated(model, "", blocks);
  return blocks;
}

}  // namespace lockstep::activations

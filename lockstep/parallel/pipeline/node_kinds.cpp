#include <lockstep/parallel/pipeline/node_kinds.h>

#include <unordered_set>
#include <utility>

namespace lockstep::pipeline {

namespace {

// "SqueezeBackward1" is the second overload's.
std::string without_overload(std::string name) {
  name.erase(name.find_last_not_of("0123456789") + 1);
  return name;
}

}  // namespace

bool only_passes_on(std::string name) {
  static const std::unordered_set<std::string> names = {
      "AliasBackward",
      "AsStridedBackward",
      "CatBackward",
      "CloneBackward",
      "ExpandBackward",
      "PermuteBackward",
      "SelectBackward",
      "ReshapeAliasBackward",
      "SliceBackward",
      "SplitBackward",
      "SplitWithSizesBackward",
      "SqueezeBackward",
      "StackBackward",
      "TBackward",
      "ToCopyBackward",
      "TransposeBackward",
      "UnbindBackward",
      "UnsafeSplitBackward",
      "UnsafeViewBackward",
      "UnsqueezeBackward",
      "UnsafeSplitWithSizesBackward",
      "ViewBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

// LinearBackward is MPS's; elsewhere a linear layer is one of the products. Convolutions of all
// dimensions, transposed ones too, are one node.
bool can_wait(std::string name) {
  // A function that says so of itself (nn/weights_may_wait.h).
  if (name.find("lockstep::nn::WeightsMayWait<") != std::string::npos) return true;
  static const std::unordered_set<std::string> names = {
      "AddmmBackward",  "BaddbmmBackward",   "BmmBackward",         "MmBackward",
      "LinearBackward", "EmbeddingBackward", "IndexSelectBackward", "ConvolutionBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

}  // namespace lockstep::pipeline

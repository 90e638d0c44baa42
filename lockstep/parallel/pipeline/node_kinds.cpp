#include <lockstep/parallel/pipeline/node_kinds.h>

#include <unordered_set>

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
      "AliasBackward",        "AsStridedBackward", "CatBackward",
      "CloneBackward",        "ExpandBackward",    "PermuteBackward",
      "ReshapeAliasBackward", "SelectBackward",    "SliceBackward",
      "SplitBackward",        "SqueezeBackward",   "SplitWithSizesBackward",
      "StackBackward",        "TBackward",         "ToCopyBackward",
      "TransposeBackward",    "UnbindBackward",    "UnsafeSplitBackward",
      "UnsafeViewBackward",   "UnsqueezeBackward", "UnsafeSplitWithSizesBackward",
      "ViewBackward",         "ViewAsBackward",    "ExpandAsBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

bool can_wait(std::string name) {
  static const std::unordered_set<std::string> names = {
      "AddmmBackward",
      "BaddbmmBackward",
      "BmmBackward",
      "ConvolutionBackward",
      "CudnnConvolutionBackward",
      "EmbeddingBackward",
      "IndexSelectBackward",
      "LinearBackward",
      "MkldnnConvolutionBackward",
      "MkldnnLinearBackward",
      "MmBackward",
      "MpsConvolutionBackward",
      "ThnnConv2DBackward",
      "SlowConvDilated2DBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

}  // namespace lockstep::pipeline

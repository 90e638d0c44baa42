// A tensor that the ranks of an axis have equal parts of, and that shows itself whole: its sizes
// are those of the whole, and its memory is the part's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::tensor {

class SplitOwner;

// What is behind such a tensor. It lies in the context of the tensor's storage, which has no bytes,
// so it is there for as long as the tensor and whatever LibTorch makes of it without asking.
struct Split {
  std::shared_ptr<SplitOwner> owner;
  // This rank's part: an ordinary tensor, with a graph of its own where one is recorded.
  at::Tensor part;
  std::int64_t dim = 0;  // the one that is cut
  // What it comes from: a parameter, or the layer whose product it is.
  std::shared_ptr<const std::string> source;
  // The node that leads gradients of the tensor to the part. Where it is the tensor's, operators go
  // by the part's own graph; it is there for what is no operator, as a function of the user's.
  const void* node = nullptr;
};

// The tensor that stands for it: an ordinary one for whoever asks for sizes, type and device, and
// every operator on it leads to the owner. Pointers to its memory are null, and storage() throws,
// so that nothing can be written or saved by accident.
//
// `strides` are the whole's, where the part's do not tell: it may have one element along the dim,
// and then any stride there.
at::Tensor make_split(Split split, at::OptionalIntArrayRef strides = {});
// The same, of another part: `like` says all but the dim.
at::Tensor make_split_like(const Split& like, at::Tensor part, std::int64_t dim,
                           at::OptionalIntArrayRef strides = {});

// Null where the tensor is none of these.
const Split* split_of(const at::Tensor& tensor);

// The part to compute with. Where gradients are for the tensor itself, as those of a parameter, one
// that leads to it.
at::Tensor part_to_read(const at::Tensor& tensor);
// The part to write to, and what follows once it was. UsageError where that is a parameter whose
// gradients are recorded, as it is an error of any other.
at::Tensor part_to_write(const at::Tensor& tensor);
void was_written(const at::Tensor& tensor);

// All of it, on every rank, which all call it; autograd follows. Lies in memory as the parts do.
at::Tensor whole_of(const at::Tensor& tensor);

// The strides of a whole, of which a part has these, and the reverse.
std::vector<std::int64_t> whole_strides(at::IntArrayRef part_strides, std::int64_t dim, int parts);
std::vector<std::int64_t> part_strides(at::IntArrayRef whole_strides, std::int64_t dim, int parts);

}  // namespace lockstep::tensor

// The rules by which operators run on parts. Each returns false, and leaves the call as it was,
// where its operator needs all of a tensor after all.
#pragma once

#include <optional>

#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/tensor/split_owner.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

bool run_product(intercept::Call& call, SplitOwner& owner);
bool run_lookup(intercept::Call& call, SplitOwner& owner);
bool run_view(intercept::Call& call, SplitOwner& owner);
bool run_element_wise(intercept::Call& call, SplitOwner& owner);
bool run_make_alike(intercept::Call& call, SplitOwner& owner);
bool run_draw(intercept::Call& call, SplitOwner& owner);
bool run_dropout(intercept::Call& call, SplitOwner& owner);
bool run_norm(intercept::Call& call, SplitOwner& owner);

// Of whole tensors. Parts that the operator wrote to get what it wrote.
void run_gathered(intercept::Call& call, SplitOwner& owner);

// An argument that is a tensor of this owner's, or null.
const Split* split_argument(const c10::IValue& argument, const SplitOwner& owner);
// Puts a result in place of a call's arguments.
void return_instead(intercept::Call& call, at::Tensor result);
// Where a call's arguments lie on its stack, to put others there.
std::span<c10::IValue> arguments_of(intercept::Call& call);

// How tensors of different dims are cut alike, as broadcasting lays them over each other.
struct Alignment {
  std::int64_t from_last = 0;  // the dim that is cut, counted from the last
  std::int64_t size = 0;       // of all ranks' parts

  bool operator==(const Alignment&) const = default;
};

Alignment alignment_of(const at::Tensor& whole, std::int64_t dim);
// Whether a tensor that every rank has whole has a part that goes with parts aligned so.
bool has_aligned_part(const at::Tensor& tensor, const Alignment& alignment);
at::Tensor aligned_part(const at::Tensor& tensor, const Alignment& alignment,
                        const nn::TensorAxis& axis);

}  // namespace lockstep::tensor

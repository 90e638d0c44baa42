// Tensors that the ranks of an axis have equal parts of, and the operators that run on them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/parallel/tensor/parallelize_module.h>

namespace lockstep::tensor {

// A dim of a tensor that is cut. The whole's dim is `blocks` equal blocks, one after the other, and
// each of them is cut over the ranks: 3 for a weight that gives queries, keys and values, or the
// size of the batch where samples and heads share a dim. A part is this rank's parts of all blocks.
struct CutDim {
  std::int64_t dim = 0;
  std::int64_t blocks = 1;

  bool operator==(const CutDim&) const = default;
};

// A cut tensor shows itself whole: its sizes are those of the whole, and its memory is the part's.
// This is the part behind it. It lies in the context of the tensor's storage, which has no bytes,
// so it lives as long as the tensor and everything that LibTorch makes of it without an operator.
struct Split {
  std::shared_ptr<SplitOwner> owner;
  // This rank's part: an ordinary tensor, with its own graph if one is recorded.
  at::Tensor part;
  CutDim cut;
  // The parameter or the layer that it comes from.
  std::shared_ptr<const std::string> source;
  // The tensor is not cut: each rank's part has its sizes, and it is their sum, which is computed
  // when an operator needs it.
  bool is_sum = false;
  // The node that leads gradients of the tensor to the part. If it is the tensor's node, operators
  // use the part's own graph; the node is for code that is no operator, such as a user's function.
  const void* node = nullptr;
  // Whether a strategy trains the parameter: its part is then a leaf, and takes the gradients.
  bool trained = false;
};

// The tensor that stands for a part. It has sizes, a type and a device like an ordinary one, and
// every operator on it goes to the owner. Pointers to its memory are null, and storage() throws, so
// that nothing can be written or saved by accident.
//
// `strides` are the whole's, if the part's strides do not tell: a part with one element along the
// dim may have any stride there.
at::Tensor make_split(Split split, at::OptionalIntArrayRef strides = {});
// The same for another part, with everything but the cut as in `like`.
at::Tensor make_split_like(const Split& like, at::Tensor part, CutDim cut,
                           at::OptionalIntArrayRef strides = {});

// Null where the tensor is not cut.
const Split* split_of(const at::Tensor& tensor);

// The part to compute with. If gradients belong to the tensor itself, as a parameter's do, its
// graph leads to the tensor.
at::Tensor part_to_read(const at::Tensor& tensor);
// The part to write to; was_written() has to be called afterwards. UsageError for a parameter while
// gradients are recorded, as for any other parameter.
at::Tensor part_to_write(const at::Tensor& tensor);
void was_written(const at::Tensor& tensor);

// The whole tensor, on every rank; all ranks call it. Autograd follows. Its layout is that of the
// parts.
at::Tensor whole_of(const at::Tensor& tensor);

// This rank's part of a tensor that every rank has whole. The first gathers the gradient in
// backward; the second does not, and is for tensors without one.
at::Tensor take_part(const at::Tensor& whole, CutDim cut, const nn::TensorAxis& axis);
at::Tensor own_part(const at::Tensor& whole, CutDim cut, const nn::TensorAxis& axis);

// The strides of a whole from those of a part, and the reverse.
std::vector<std::int64_t> whole_strides(at::IntArrayRef part_strides, std::int64_t dim, int parts);
std::vector<std::int64_t> part_strides(at::IntArrayRef whole_strides, std::int64_t dim, int parts);

// A layer that computed with a part, in a model whose plan is tried out.
struct LayerUse {
  std::string layer;
  std::string fed_by;  // the layer whose cut output is its input as it is; empty if there is none
  std::int64_t outputs = 0;  // elements of the whole output

  bool operator==(const LayerUse&) const = default;
};

// Counts what is gathered. The first rank's log says once for each operator that it gathers.
// Threading: any.
class GatherLog {
 public:
  // `speaks`: whether this rank writes to the log.
  explicit GatherLog(bool speaks) : speaks_(speaks) {}

  void add(const std::string& op, const std::string& source, std::int64_t bytes);

  // Sorted by names.
  std::vector<Gathered> all() const;
  void clear();

  // From now on uses of layers are noted, and the log says nothing.
  void trace();
  bool traces() const { return traces_; }
  void note_use(LayerUse use);
  std::vector<LayerUse> uses() const;  // in the order of the step

 private:
  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };

  bool speaks_;
  bool traces_ = false;
  mutable std::mutex mutex_;
  std::map<std::string, bool> said_;  // for each operator; clear() keeps it
  std::map<std::pair<std::string, std::string>, Count> counts_;
  std::vector<LayerUse> uses_;
};

// Computes with cut tensors: on parts where that gives parts of the result, and on gathered tensors
// where it does not. Results are those of whole tensors: whole, and the same on every rank, or cut.
// Every rank of the axis runs the same operators on cut tensors, in the same order.
//
// Ownership: kept alive by the tensors that are cut. Threading: any thread that computes; as the
// axis where ranks communicate. Failure: UsageError for what cannot be done with a cut tensor;
// CommError from the axis.
class SplitOwner final : public intercept::PartOwner {
 public:
  explicit SplitOwner(std::shared_ptr<comm::Communicator> group);

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;
  at::Tensor train_part(const at::Tensor& parameter) override;
  at::Tensor shown_gradient(const at::Tensor& parameter, const at::Tensor& of_part) const override;

  const nn::TensorAxis& axis() const { return axis_; }
  GatherLog& gathers() { return gathers_; }

  // Gathers a tensor of this owner, for an operator that needs the whole.
  at::Tensor gathered(const at::Tensor& tensor, const std::string& op);

 private:
  nn::TensorAxis axis_;
  GatherLog gathers_;
};

// UsageError, with the numbers, for a plan that parallelize_module() refuses.
void check_plan(torch::nn::Module& model, const Plan& plan, const comm::Communicator& group);

// The rules by which operators run on parts. Each returns false, and leaves the call as it was, if
// its operator needs all of a tensor.
bool run_product(intercept::Call& call, SplitOwner& owner);
bool run_batched(intercept::Call& call, SplitOwner& owner);
bool run_attention(intercept::Call& call, SplitOwner& owner);
bool run_joined(intercept::Call& call, SplitOwner& owner);
bool run_sum(intercept::Call& call, SplitOwner& owner);
bool run_softmax(intercept::Call& call, SplitOwner& owner);
bool run_class_loss(intercept::Call& call, SplitOwner& owner);
bool run_lookup(intercept::Call& call, SplitOwner& owner);
bool run_view(intercept::Call& call, SplitOwner& owner);
bool run_element_wise(intercept::Call& call, SplitOwner& owner);
bool run_make_alike(intercept::Call& call, SplitOwner& owner);
bool run_draw(intercept::Call& call, SplitOwner& owner);
bool run_dropout(intercept::Call& call, SplitOwner& owner);
bool run_norm(intercept::Call& call, SplitOwner& owner);

// Runs an operator on gathered tensors. Parts that it wrote to are updated.
void run_gathered(intercept::Call& call, SplitOwner& owner);

// The split of an argument that is a tensor of this owner, or null.
const Split* split_argument(const c10::IValue& argument, const SplitOwner& owner);
// Puts a result in place of a call's arguments.
void return_instead(intercept::Call& call, c10::IValue result);
// A call's arguments on its stack, which can be replaced there.
std::span<c10::IValue> arguments_of(intercept::Call& call);

// Where a tensor is cut, counted as broadcasting aligns tensors with different numbers of dims.
struct Alignment {
  std::int64_t from_last = 0;  // the dim that is cut, counted from the last
  std::int64_t size = 0;       // the size of the whole there
  std::int64_t blocks = 1;

  bool operator==(const Alignment&) const = default;
};

Alignment alignment_of(const at::Tensor& whole, CutDim cut);
// The inverse, for a tensor with as many dims as `whole`.
CutDim cut_of(const at::Tensor& whole, const Alignment& alignment);
// Whether a tensor that every rank has whole has a part that fits to parts with this alignment.
bool has_aligned_part(const at::Tensor& tensor, const Alignment& alignment);
at::Tensor aligned_part(const at::Tensor& tensor, const Alignment& alignment,
                        const nn::TensorAxis& axis);

}  // namespace lockstep::tensor

#include <lockstep/comm/quantized.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/algorithms/reduction_tree.h>
#include <lockstep/comm/codecs/block_quantizer.h>
#include <lockstep/comm/scalar_type.h>

namespace lockstep::comm {

namespace {

void check_tensor(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) throw UsageError("the {} of a quantized collective is undefined", what);
  if (!tensor.device().is_cpu())
    throw UsageError("the {} of a quantized collective is on {}: only tensors in the process's "
                     "memory can be quantized so far",
                     what, tensor.device().str());
  if (!tensor.is_contiguous())
    throw UsageError("the {} of a quantized collective is not contiguous: pass contiguous()", what);
  const auto type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    throw UsageError("the {} of a quantized collective is {}: Float, Half and BFloat16 can be "
                     "quantized",
                     what, c10::toString(type));
}

void check_sizes(const Communicator& group, const char* whole_name, const at::Tensor& whole,
                 const char* part_name, const at::Tensor& part) {
  if (whole.numel() != part.numel() * group.size())
    throw UsageError("a quantized collective of {} ranks has an {} of {} elements and an {} of {}: "
                     "{} times {} are needed",
                     group.size(), whole_name, whole.numel(), part_name, part.numel(), group.size(),
                     part.numel());
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

// A message of `count` elements for each of some ranks, one after the other. [ranks, bytes]
at::Tensor messages_for(int num_ranks, std::size_t count, const BlockFormat& format) {
  return at::empty({num_ranks, static_cast<std::int64_t>(encoded_bytes(count, format))}, at::kByte);
}

std::byte* message(const at::Tensor& messages, int rank) {
  return bytes_of(messages) + rank * messages.size(1);
}

// Elements [rank · count, (rank + 1) · count) of a tensor.
std::byte* part(const at::Tensor& tensor, int rank, std::size_t count) {
  return bytes_of(tensor) + static_cast<std::size_t>(rank) * count * tensor.element_size();
}

// sums ← the messages of a node's ranks, decoded and added in the tree's order.
void add_up(const at::Tensor& messages, TreeNode node, const BlockFormat& format,
            const at::Tensor& sums) {
  const auto count = static_cast<std::size_t>(sums.numel());
  if (node.count == 1)
    return decode_blocks(format, DType::float32, message(messages, node.first), count,
                         bytes_of(sums));
  const int left = tree_split(node.count);
  const TreeNode right{node.first + left, node.count - left};
  add_up(messages, {node.first, left}, format, sums);
  if (right.count == 1)
    return decode_and_add(format, message(messages, right.first), count, sums.data_ptr<float>());
  const at::Tensor others = at::empty_like(sums);
  add_up(messages, right, format, others);
  sums.add_(others);
}

}  // namespace

void quantized_all_gather(Communicator& group, const at::Tensor& output, const at::Tensor& input,
                          const BlockFormat& format) {
  check_format(format);
  check_tensor(output, "output");
  check_tensor(input, "input");
  check_sizes(group, "output", output, "input", input);
  const c10::NoGradGuard no_grad;
  const auto count = static_cast<std::size_t>(input.numel());
  const at::Tensor own = messages_for(1, count, format);
  const at::Tensor all = messages_for(group.size(), count, format);
  encode_blocks(format, dtype_of(input.scalar_type()), bytes_of(input), count, bytes_of(own));
  group.all_gather(all, own).wait_on_host();
  for (int rank = 0; rank < group.size(); ++rank)
    decode_blocks(format, dtype_of(output.scalar_type()), message(all, rank), count,
                  part(output, rank, count));
}

void quantized_reduce_scatter(Communicator& group, const at::Tensor& output,
                              const at::Tensor& input, const QuantizedReduction& reduction) {
  const BlockFormat& format = reduction.format;
  check_format(format);
  if (reduction.op != ReduceOp::sum && reduction.op != ReduceOp::mean)
    throw UsageError("a quantized reduce_scatter with {} was asked for: it has sum and mean",
                     name(reduction.op));
  check_tensor(output, "output");
  check_tensor(input, "input");
  check_sizes(group, "input", input, "output", output);
  const c10::NoGradGuard no_grad;
  const auto count = static_cast<std::size_t>(output.numel());
  const at::Tensor sent = messages_for(group.size(), count, format);
  const at::Tensor received = messages_for(group.size(), count, format);
  for (int rank = 0; rank < group.size(); ++rank)
    encode_blocks(format, dtype_of(input.scalar_type()), part(input, rank, count), count,
                  message(sent, rank));
  group.all_to_all(received, sent).wait_on_host();
  const bool in_place = output.scalar_type() == at::kFloat;
  const at::Tensor sums = in_place ? output.detach() : at::empty(output.sizes(), at::kFloat);
  add_up(received, {0, group.size()}, format, sums);
  if (reduction.op == ReduceOp::mean) sums.div_(group.size());
  if (!in_place) output.copy_(sums);
}

}  // namespace lockstep::comm

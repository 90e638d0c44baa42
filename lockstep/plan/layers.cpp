#include <lockstep/plan/layers.h>

#include <algorithm>

#include <lockstep/plan/precision.h>

namespace lockstep::plan {

namespace {

using Value = Tape::Value;

// A block of scores of nn::attention on one thread.
constexpr std::int64_t kScores = std::int64_t{64} * 512 * kFloat;

// The most logits that nn::linear_cross_entropy holds at once; on a GPU its blocks are multiples of
// kRowsOfAProduct rows.
constexpr std::int64_t kLogitsCpu = 16 << 20;
constexpr std::int64_t kLogitsGpu = 1 << 30;
constexpr std::int64_t kRowsOfAProduct = 256;

// Thread blocks of a norm's backward, each of which sums the gradients of the weights by itself.
constexpr std::int64_t kMostPartialSums = 1024;

}  // namespace

std::size_t Layers::parameter(std::int64_t num_elements, std::int64_t matrix_rows) {
  parameters_.push_back(
      {.num_elements = num_elements, .block = block_, .matrix_rows = matrix_rows});
  return tape_.add_parameter(num_elements * terms_.element_bytes);
}

Linear Layers::linear(std::int64_t in, std::int64_t out, HasBias bias) {
  Linear layer{.in = in, .out = out, .parameters = {parameter(in * out, out)}};
  if (bias == HasBias::yes) layer.parameters.push_back(parameter(out));
  return layer;
}

Norm Layers::layer_norm(std::int64_t width) {
  const std::size_t weight = parameter(width);
  return {.kind = Norm::Kind::layer, .parameters = {weight, parameter(width)}};
}

Norm Layers::rms_norm(std::int64_t width) {
  return {.kind = Norm::Kind::rms, .parameters = {parameter(width)}};
}

Embedding Layers::embedding(std::int64_t rows, std::int64_t width) {
  return {.rows = rows, .width = width, .weight = parameter(rows * width)};
}

Value Layers::apply(const Linear& layer, const Value& x) {
  return tape_.apply({.inputs = {x},
                      .bytes = x.bytes / layer.in * layer.out,
                      .saved = {x.memory},
                      .parameters = layer.parameters,
                      .read_again = {layer.parameters.front()}});
}

Value Layers::apply(const Norm& layer, const Value& x) {
  const std::int64_t width = x.bytes / terms_.element_bytes / terms_.num_tokens;
  // This is the limit that nn::cuda::norm_takes() has.
  const bool on_gpu = terms_.kernels == Kernels::gpu && width % 4 == 0 && width <= 8192;
  if (layer.kind == Norm::Kind::rms && !on_gpu) return rms_of_operators(layer, x);
  return tape_.apply(
      {.inputs = {x},
       .bytes = x.bytes,
       .saved = {x.memory},
       .statistics = 2 * terms_.num_tokens * kFloat,  // means and deviations
       .parameters = layer.parameters,
       .read_again = {layer.parameters.front()},
       .backward_scratch =
           on_gpu ? 2 * std::min(terms_.num_tokens, kMostPartialSums) * width * kFloat : 0});
}

Value Layers::to_type(const Value& x, std::int64_t element_bytes) {
  if (element_bytes == terms_.element_bytes) return x;
  return tape_.apply({.inputs = {x}, .bytes = x.bytes / terms_.element_bytes * element_bytes});
}

// nn::RMSNorm on a CPU is written in LibTorch's operators.
Value Layers::rms_of_operators(const Norm& layer, const Value& x) {
  const Value wide = to_type(x, kFloat);
  const std::int64_t number = terms_.num_tokens * kFloat;  // one for each token
  const Value square = tape_.apply({.inputs = {wide},
                                    .bytes = wide.bytes,
                                    .saved = {wide.memory},
                                    .backward_scratch = 2 * wide.bytes});
  // Its gradient is one number for each token, too, looked at as many.
  const Value sum = tape_.apply({.inputs = {square}, .bytes = number, .gradients = {number}});
  // In place.
  Value inverse = tape_.apply({.inputs = {sum}, .saved = {sum.memory}});
  inverse.memory = sum.memory;
  inverse.bytes = number;
  Value normal = tape_.apply({.inputs = {wide, inverse},
                              .bytes = wide.bytes,
                              .saved = {wide.memory, inverse.memory},
                              .backward_scratch = wide.bytes});  // before it is summed
  if (x.bytes != wide.bytes) normal = tape_.apply({.inputs = {normal}, .bytes = x.bytes});
  return tape_.apply({.inputs = {normal},
                      .bytes = x.bytes,
                      .saved = {normal.memory},
                      .parameters = layer.parameters,
                      .read_again = layer.parameters,
                      .backward_scratch = x.bytes});
}

Value Layers::look_up(const Embedding& layer, std::int64_t num_tokens) {
  return tape_.apply({.inputs = {},
                      .bytes = num_tokens * layer.width * terms_.element_bytes,
                      .parameters = {layer.weight}});
}

Value Layers::attention(const Value& q, const Value& k, const Value& v, std::int64_t num_heads) {
  Value keys = k, values = v;
  const bool shares_keys = terms_.kernels == Kernels::cpu ||
                           (terms_.kernels == Kernels::gpu && terms_.element_bytes != kFloat);
  if (!shares_keys && k.bytes != q.bytes) {
    keys = tape_.apply({.inputs = {k}, .bytes = q.bytes});
    values = tape_.apply({.inputs = {v}, .bytes = q.bytes});
  }
  return tape_.apply({.inputs = {q, keys, values},
                      .bytes = q.bytes,
                      .saved = {q.memory, keys.memory, values.memory},
                      .saves_result = true,
                      .statistics = terms_.num_tokens * num_heads * kFloat,
                      .forward_scratch = terms_.kernels == Kernels::cpu ? kScores : 0,
                      .backward_scratch = terms_.kernels == Kernels::cpu ? 2 * kScores : 0});
}

// A kernel on a GPU; elsewhere four products and two sums of one half each, in float.
Value Layers::rotary(const Value& x) {
  if (terms_.kernels == Kernels::gpu) return tape_.apply({.inputs = {x}, .bytes = x.bytes});
  const std::int64_t wide = x.bytes / terms_.element_bytes * kFloat;
  const std::int64_t scratch = 3 * wide + (wide == x.bytes ? 0 : wide);
  return tape_.apply(
      {.inputs = {x}, .bytes = x.bytes, .forward_scratch = scratch, .backward_scratch = scratch});
}

Value Layers::gelu(const Value& x) {
  return tape_.apply({.inputs = {x}, .bytes = x.bytes, .saved = {x.memory}});
}

Value Layers::silu_multiply(const Value& gate, const Value& up) {
  Value open = gate;
  if (terms_.kernels == Kernels::libtorch)
    open = tape_.apply({.inputs = {gate}, .bytes = gate.bytes, .saved = {gate.memory}});
  return tape_.apply({.inputs = {open, up}, .bytes = up.bytes, .saved = {open.memory, up.memory}});
}

// The mask is drawn again in backward. On a GPU it is made of whole tensors of 64-bit numbers.
Value Layers::dropout(const Value& x, double p) {
  if (p == 0) return x;
  const std::int64_t mask =
      x.bytes / terms_.element_bytes * (terms_.kernels == Kernels::gpu ? 6 * 8 : kFloat);
  return tape_.apply(
      {.inputs = {x}, .bytes = x.bytes, .forward_scratch = mask, .backward_scratch = mask});
}

// Gradients are computed in forward, from a block of logits at a time, and scaled in backward.
Value Layers::linear_cross_entropy(const Value& hidden, const Embedding& head) {
  const std::int64_t rows = terms_.num_tokens;
  const bool on_gpu = terms_.kernels == Kernels::gpu;
  const std::int64_t logits = logits_at_once(head.rows) * head.rows;
  const std::int64_t weight = head.rows * head.width;
  const bool narrow = terms_.element_bytes != kFloat;
  std::int64_t scratch = logits * terms_.element_bytes + rows * 3 * kFloat;
  // Each block's share of the weight's gradient; elsewhere than on a GPU its logits in float, too.
  if (narrow) scratch += weight * terms_.element_bytes;
  if (narrow && !on_gpu) scratch += logits * (kFloat + terms_.element_bytes);
  return tape_.apply({.inputs = {hidden},
                      .bytes = kFloat,
                      .statistics = hidden.bytes + weight * kFloat,
                      .parameters = {head.weight},
                      .forward_scratch = scratch,
                      .backward_scratch = narrow ? weight * kFloat : 0});
}

// Rows of a block; on a GPU blocks are of nearly the same size.
std::int64_t Layers::logits_at_once(std::int64_t vocabulary) const {
  const std::int64_t rows = terms_.num_tokens;
  const bool on_gpu = terms_.kernels == Kernels::gpu;
  const std::int64_t element = on_gpu ? terms_.element_bytes : kFloat;
  const std::int64_t most =
      std::max<std::int64_t>(1, (on_gpu ? kLogitsGpu : kLogitsCpu) / (vocabulary * element));
  if (rows <= most || !on_gpu) return std::min(rows, most);
  const std::int64_t num_blocks = (rows + most - 1) / most;
  const std::int64_t share = (rows + num_blocks - 1) / num_blocks;
  return std::min(most, (share + kRowsOfAProduct - 1) / kRowsOfAProduct * kRowsOfAProduct);
}

}  // namespace lockstep::plan

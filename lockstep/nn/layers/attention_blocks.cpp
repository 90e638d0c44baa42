#include <lockstep/nn/layers/attention_blocks.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/device/parallel_pieces.h>
#include <lockstep/nn/kernels/cpu/softmax_kernels.h>

namespace lockstep::nn::internal {

namespace {

// The numbers of queries and keys whose scores are in memory at once. Fewer queries waste less
// above the diagonal, more keep the matrix products busy; two blocks of scores stay in a core's
// second-level cache.
constexpr std::int64_t kQueries = 64;
constexpr std::int64_t kKeys = 512;

// A matrix inside a tensor, with rows of contiguous floats.
struct Rows {
  float* data = nullptr;
  std::int64_t count = 0;
  std::int64_t width = 0;
  std::int64_t stride = 0;

  float* operator[](std::int64_t row) const { return data + row * stride; }
  Rows slice(std::int64_t begin, std::int64_t size) const {
    return {data + begin * stride, size, width, stride};
  }
  at::Tensor tensor() const {
    return at::from_blob(data, {count, width}, {stride, 1}, at::TensorOptions(at::kFloat));
  }
};

Rows rows_of(const at::Tensor& tensor, std::int64_t batch, std::int64_t head) {
  return {tensor.data_ptr<float>() + batch * tensor.stride(0) + head * tensor.stride(1),
          tensor.size(2), tensor.size(3), tensor.stride(2)};
}

float* row_of(const at::Tensor& log_sum_exp, std::int64_t batch, std::int64_t head) {
  return log_sum_exp.data_ptr<float>() + batch * log_sum_exp.stride(0) +
         head * log_sum_exp.stride(1);
}

// Returns the tensor itself if its rows can be read in place, otherwise a copy.
at::Tensor readable(const at::Tensor& tensor) {
  const bool lies_well = (tensor.size(3) <= 1 || tensor.stride(3) == 1) &&
                         (tensor.size(2) <= 1 || tensor.stride(2) >= tensor.size(3));
  return lies_well ? tensor : tensor.contiguous();
}

// The keys that the queries of a block see.
struct Sight {
  std::int64_t keys = 0;
  std::int64_t offset = 0;  // query i sees the keys up to i + offset
  bool causal = true;

  std::int64_t of(std::int64_t query) const {
    return causal ? std::min(keys, query + offset + 1) : keys;
  }
  // The number of visible keys in [begin, begin + count).
  std::int64_t within(std::int64_t query, std::int64_t begin, std::int64_t count) const {
    return std::clamp<std::int64_t>(of(query) - begin, 0, count);
  }
};

// Scratch of one thread: a block of scores, as a matrix of any number of columns up to kKeys.
class Scores {
 public:
  Scores() : memory_(at::empty({kQueries * kKeys}, at::TensorOptions(at::kFloat))) {}
  Rows block(std::int64_t rows, std::int64_t columns) const {
    return {memory_.data_ptr<float>(), rows, columns, columns};
  }

 private:
  at::Tensor memory_;
};

// to = a·b, or to += a·b.
void multiply(const Rows& to, const at::Tensor& a, const at::Tensor& b) {
  auto result = to.tensor();
  at::mm_out(result, a, b);
}
void multiply_add(const Rows& to, const at::Tensor& a, const at::Tensor& b) {
  auto result = to.tensor();
  at::addmm_out(result, result, a, b);
}

// `more`: the output already holds a result over other keys.
enum class Keys { all, more };

// Computes one head. Softmax is taken block by block of keys: the sums so far are scaled down
// whenever a larger score turns up. A result over other keys is treated as such a sum, with sum 1
// and scaled by e^log_sum_exp.
void forward_head(const Rows& q, const Rows& k, const Rows& v, const Rows& output,
                  float* log_sum_exp, const Sight& sight, float scale, const Scores& scratch,
                  Keys which) {
  float largest[kQueries];
  float sum[kQueries];
  for (std::int64_t first = 0; first < q.count; first += kQueries) {
    const auto count = std::min(kQueries, q.count - first);
    const auto queries = q.slice(first, count).tensor();
    const auto to = output.slice(first, count);
    const auto keys = sight.of(first + count - 1);
    if (which == Keys::more) {
      std::copy_n(log_sum_exp + first, count, largest);
      std::fill_n(sum, count, 1.0f);
    } else {
      std::fill_n(largest, count, -std::numeric_limits<float>::infinity());
      std::fill_n(sum, count, 0.0f);
    }
    for (std::int64_t begin = 0; begin < keys; begin += kKeys) {
      const auto width = std::min(kKeys, keys - begin);
      const bool starts = begin == 0 && which == Keys::all;
      const auto scores = scratch.block(count, width);
      multiply(scores, queries, k.slice(begin, width).tensor().t());
      for (std::int64_t row = 0; row < count; ++row) {
        const auto seen = sight.within(first + row, begin, width);
        const float before = largest[row];
        largest[row] = std::max(before, row_max(scores[row], seen, scale));
        const float kept = starts ? 0.0f : std::exp(before - largest[row]);
        sum[row] = sum[row] * kept + row_exp(scores[row], scores[row], seen, scale, largest[row]);
        std::fill(scores[row] + seen, scores[row] + width, 0.0f);
        if (!starts) row_scale(to[row], to.width, kept);
      }
      const auto values = v.slice(begin, width).tensor();
      if (starts)
        multiply(to, scores.tensor(), values);
      else
        multiply_add(to, scores.tensor(), values);
    }
    for (std::int64_t row = 0; row < count; ++row) {
      row_scale(to[row], to.width, 1.0f / sum[row]);
      log_sum_exp[first + row] = largest[row] + std::log(sum[row]);
    }
  }
}

struct HeadGradients {
  Rows q;
  Rows k;
  Rows v;
};

// Computes the gradients of one head and adds them to those given.
void backward_head(const Rows& grad, const Rows& q, const Rows& k, const Rows& v,
                   const Rows& output, const float* log_sum_exp, const HeadGradients& gradients,
                   const Sight& sight, float scale, const Scores& first_scratch,
                   const Scores& second_scratch) {
  float means[kQueries];
  for (std::int64_t first = 0; first < q.count; first += kQueries) {
    const auto count = std::min(kQueries, q.count - first);
    const auto queries = q.slice(first, count).tensor();
    const auto grad_rows = grad.slice(first, count).tensor();
    // This is the sum over the keys of each probability times its gradient, computed without
    // either.
    for (std::int64_t row = 0; row < count; ++row)
      means[row] = row_dot(grad[first + row], output[first + row], output.width);
    const auto keys = sight.of(first + count - 1);
    for (std::int64_t begin = 0; begin < keys; begin += kKeys) {
      const auto width = std::min(kKeys, keys - begin);
      const auto key_rows = k.slice(begin, width).tensor();
      const auto probabilities = first_scratch.block(count, width);
      const auto slopes = second_scratch.block(count, width);
      multiply(probabilities, queries, key_rows.t());
      multiply(slopes, grad_rows, v.slice(begin, width).tensor().t());
      for (std::int64_t row = 0; row < count; ++row) {
        const auto seen = sight.within(first + row, begin, width);
        row_exp(probabilities[row], probabilities[row], seen, scale, log_sum_exp[first + row]);
        std::fill(probabilities[row] + seen, probabilities[row] + width, 0.0f);
        row_softmax_backward(probabilities[row], slopes[row], seen, means[row], scale);
        std::fill(slopes[row] + seen, slopes[row] + width, 0.0f);
      }
      multiply_add(gradients.v.slice(begin, width), probabilities.tensor().t(), grad_rows);
      const auto score_gradients = slopes.tensor();
      multiply_add(gradients.k.slice(begin, width), score_gradients.t(), queries);
      multiply_add(gradients.q.slice(first, count), score_gradients, key_rows);
    }
  }
}

void forward_heads(const AttentionResult& result, const at::Tensor& queries, const at::Tensor& keys,
                   const at::Tensor& values, const AttentionTerms& terms, Keys which) {
  const auto q = readable(queries), k = readable(keys), v = readable(values);
  const auto heads = q.size(1);
  const Sight sight{k.size(2), k.size(2) - q.size(2), terms.causal};
  device::parallel_pieces(q.size(0) * heads, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Scores scratch;
    for (auto piece = begin; piece < end; ++piece) {
      const auto batch = piece / heads, head = piece % heads;
      const auto kv_head = head / (heads / k.size(1));
      forward_head(rows_of(q, batch, head), rows_of(k, batch, kv_head), rows_of(v, batch, kv_head),
                   rows_of(result.output, batch, head), row_of(result.log_sum_exp, batch, head),
                   sight, static_cast<float>(terms.scale), scratch, which);
    }
  });
}

}  // namespace

at::Tensor empty_by_position(const at::Tensor& like, at::ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView not_tracked;
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)},
                   like.options().dtype(type))
      .transpose(1, 2);
}

AttentionResult attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionTerms& terms) {
  const AttentionResult result{
      empty_by_position(q, at::kFloat),
      at::empty({q.size(0), q.size(1), q.size(2)}, at::TensorOptions(at::kFloat))};
  // Softmax over no keys gives zeros.
  if (k.size(2) == 0)
    result.output.zero_();
  else
    forward_heads(result, q, k, v, terms, Keys::all);
  return result;
}

void attention_forward_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionTerms& terms) {
  forward_heads(so_far, q, k, v, terms, Keys::more);
}

AttentionGradients attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const AttentionResult& result, const AttentionTerms& terms) {
  AttentionGradients gradients{empty_by_position(q, at::kFloat).zero_(),
                               empty_by_position(k, at::kFloat).zero_(),
                               empty_by_position(v, at::kFloat).zero_()};
  attention_backward_more(gradients, grad, q, k, v, result, terms);
  return gradients;
}

void attention_backward_more(const AttentionGradients& gradients, const at::Tensor& output_grad,
                             const at::Tensor& queries, const at::Tensor& keys,
                             const at::Tensor& values, const AttentionResult& result,
                             const AttentionTerms& terms) {
  const auto q = readable(queries), k = readable(keys), v = readable(values);
  const auto grad = readable(output_grad);
  const auto heads = q.size(1), kv_heads = k.size(1);
  const Sight sight{k.size(2), k.size(2) - q.size(2), terms.causal};
  // The heads that share keys and values are computed one after the other in one thread, because
  // they add to the same gradients.
  device::parallel_pieces(q.size(0) * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Scores first, second;
    const auto group = heads / kv_heads;
    for (auto piece = begin; piece < end; ++piece) {
      const auto batch = piece / kv_heads, kv_head = piece % kv_heads;
      for (auto head = kv_head * group; head < (kv_head + 1) * group; ++head)
        backward_head(rows_of(grad, batch, head), rows_of(q, batch, head),
                      rows_of(k, batch, kv_head), rows_of(v, batch, kv_head),
                      rows_of(result.output, batch, head), row_of(result.log_sum_exp, batch, head),
                      {rows_of(gradients.q, batch, head), rows_of(gradients.k, batch, kv_head),
                       rows_of(gradients.v, batch, kv_head)},
                      sight, static_cast<float>(terms.scale), first, second);
    }
  });
}

}  // namespace lockstep::nn::internal

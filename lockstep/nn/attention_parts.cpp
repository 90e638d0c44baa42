#include <lockstep/nn/attention_parts.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>

namespace lockstep::nn::internal {

namespace {

bool has_blocks(const at::Tensor& q) {
  return q.device().is_cpu() && q.scalar_type() == at::kFloat;
}

// Queries whose scores are there at once: so that those of all heads stay below a size that does
// not depend on the sequence.
std::int64_t rows_at_once(const at::Tensor& q, const at::Tensor& k) {
  const std::int64_t scores = q.device().is_cpu() ? 1 << 20 : 1 << 26;
  const auto a_row = std::max<std::int64_t>(1, q.size(0) * q.size(1) * k.size(2));
  return std::max<std::int64_t>(16, scores / a_row);
}

// [batch, heads, rows, width] as [batch, kv_heads, heads/kv_heads · rows, width]: the heads that
// share keys in one matrix. And back.
at::Tensor by_kv_head(const at::Tensor& x, std::int64_t kv_heads) {
  return x.reshape({x.size(0), kv_heads, x.size(1) / kv_heads * x.size(2), x.size(3)});
}
at::Tensor by_head(const at::Tensor& x, std::int64_t heads) {
  return x.reshape({x.size(0), heads, x.size(1) * x.size(2) / heads, x.size(3)});
}

// Some of the queries, with all keys of the part.
struct Slice {
  std::int64_t first = 0;
  std::int64_t count = 0;

  at::Tensor of(const at::Tensor& x) const { return x.narrow(2, first, count); }
};

template <typename Body>
void for_each_slice(const at::Tensor& q, const at::Tensor& k, const Body& body) {
  const auto rows = rows_at_once(q, k);
  for (std::int64_t first = 0; first < q.size(2); first += rows)
    body(Slice{first, std::min(rows, q.size(2) - first)});
}

// [batch, heads, rows, keys], -inf where a query does not see a key. `queries` are those of the
// slice, and `of` is how many there are in all.
at::Tensor scores_of(const at::Tensor& queries, const at::Tensor& k, const Slice& slice,
                     std::int64_t of, const AttentionTerms& terms) {
  auto scores =
      by_head(at::matmul(by_kv_head(queries, k.size(1)), k.transpose(2, 3)), queries.size(1))
          .mul_(terms.scale);
  if (terms.causal)
    scores.masked_fill_(at::ones({slice.count, k.size(2)}, k.options().dtype(at::kBool))
                            .triu(slice.first + k.size(2) - of + 1),
                        -std::numeric_limits<double>::infinity());
  return scores;
}

struct WideKeys {
  at::Tensor k;
  at::Tensor v;

  WideKeys(const at::Tensor& k, const at::Tensor& v)
      : k(k.to(sum_type(k.scalar_type()))), v(v.to(sum_type(v.scalar_type()))) {}
};

// Calls body(slice, output, log_sum_exp) for the queries, some at a time.
template <typename Body>
void attend_by_slices(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const AttentionTerms& terms, const Body& body) {
  const WideKeys keys(k, v);
  for_each_slice(q, k, [&](const Slice& slice) {
    auto scores = scores_of(slice.of(q).to(keys.k.scalar_type()), keys.k, slice, q.size(2), terms);
    const auto log_sum_exp = scores.logsumexp(-1);
    const auto weights = scores.sub_(log_sum_exp.unsqueeze(-1)).exp_();
    body(slice, by_head(at::matmul(by_kv_head(weights, k.size(1)), keys.v), q.size(1)),
         log_sum_exp);
  });
}

}  // namespace

at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

AttentionResult attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionTerms& terms) {
  if (has_blocks(q)) return attention_forward(q, k, v, terms);
  const auto type = sum_type(q.scalar_type());
  const AttentionResult result{
      empty_by_position(q, type),
      at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(type))};
  attend_by_slices(
      q, k, v, terms,
      [&](const Slice& slice, const at::Tensor& output, const at::Tensor& log_sum_exp) {
        slice.of(result.output).copy_(output);
        slice.of(result.log_sum_exp).copy_(log_sum_exp);
      });
  return result;
}

void attend_more(const AttentionResult& so_far, const at::Tensor& q, const at::Tensor& k,
                 const at::Tensor& v, const AttentionTerms& terms) {
  if (has_blocks(q)) return attention_forward_more(so_far, q, k, v, terms);
  attend_by_slices(
      q, k, v, terms,
      [&](const Slice& slice, const at::Tensor& output, const at::Tensor& log_sum_exp) {
        const auto before = slice.of(so_far.log_sum_exp);
        const auto both = at::logaddexp(before, log_sum_exp);
        slice.of(so_far.output)
            .mul_((before - both).exp_().unsqueeze(-1))
            .addcmul_(output, (log_sum_exp - both).exp_().unsqueeze(-1));
        before.copy_(both);
      });
}

void add_gradients(const AttentionGradients& gradients, const at::Tensor& grad, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, const AttentionResult& result,
                   const AttentionTerms& terms) {
  if (has_blocks(q)) return attention_backward_more(gradients, grad, q, k, v, result, terms);
  const WideKeys keys(k, v);
  const auto type = keys.k.scalar_type();
  const auto kv_heads = k.size(1);
  for_each_slice(q, k, [&](const Slice& slice) {
    const auto queries = slice.of(q).to(type);
    const auto output_grad = by_kv_head(slice.of(grad).to(type), kv_heads);
    auto weights = scores_of(queries, keys.k, slice, q.size(2), terms);
    weights.sub_(slice.of(result.log_sum_exp).unsqueeze(-1)).exp_();
    weights = by_kv_head(weights, kv_heads);
    gradients.v.add_(at::matmul(weights.transpose(2, 3), output_grad));
    // sum over keys of weight times its gradient, without either.
    const auto means =
        (slice.of(grad).to(type) * slice.of(result.output).to(type)).sum(-1, /*keepdim=*/true);
    const auto slopes = at::matmul(output_grad, keys.v.transpose(2, 3))
                            .sub_(by_kv_head(means, kv_heads))
                            .mul_(weights)
                            .mul_(terms.scale);
    gradients.k.add_(at::matmul(slopes.transpose(2, 3), by_kv_head(queries, kv_heads)));
    slice.of(gradients.q).add_(by_head(at::matmul(slopes, keys.k), q.size(1)));
  });
}

}  // namespace lockstep::nn::internal

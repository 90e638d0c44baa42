#include <lockstep/nn/context_parallel/ring_attention.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/device/autocast.h>

namespace lockstep::nn::internal {

namespace {

bool has_blocks(const at::Tensor& q) {
  return q.device().is_cpu() && q.scalar_type() == at::kFloat;
}

// The number of queries whose scores are in memory at once: few enough that the scores of all heads
// stay below a size that does not depend on the sequence.
std::int64_t rows_at_once(const at::Tensor& q, const at::Tensor& k) {
  const std::int64_t scores = q.device().is_cpu() ? 1 << 20 : 1 << 26;
  const auto a_row = std::max<std::int64_t>(1, q.size(0) * q.size(1) * k.size(2));
  return std::max<std::int64_t>(16, scores / a_row);
}

// Views [batch, heads, rows, width] as [batch, kv_heads, heads/kv_heads · rows, width], which puts
// the heads that share keys into one matrix; by_head() is the inverse.
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

// Scores [batch, heads, rows, keys], -inf where a query does not see a key. `queries` are those of
// the slice, and `of` is the number of all queries.
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

// Calls body(slice, output, log_sum_exp) for slices of the queries, one after the other.
template <typename Body>
void attend_by_slices(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const AttentionTerms& terms, const Body& body) {
  // It would round the scores to 16 bits, and with them what logsumexp() sees.
  const auto without_autocast = device::Autocast::off(q.device().type());
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
    // This is the sum over the keys of each weight times its gradient, computed without either.
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

namespace {

// Keys and values travel in pieces of some heads or samples, one piece after the other, so that the
// messages under way take only a piece's memory. More pieces than kMostPieces would save little
// more memory; with pieces smaller than kPieceBytes, latency would matter more than bandwidth.
constexpr std::int64_t kMostPieces = 16;
constexpr std::int64_t kPieceBytes = 256 << 10;

struct Piece {
  mesh::Interval batch;
  mesh::Interval kv_heads;

  // The piece's slice of a tensor with kv_heads, or of one with heads, of which `heads` share a
  // kv_head.
  at::Tensor of(const at::Tensor& x, std::int64_t heads = 1) const {
    return x.narrow(0, batch.begin, batch.size())
        .narrow(1, kv_heads.begin * heads, kv_heads.size() * heads);
  }
};

// Depends on nothing but the shapes and types, so every rank cuts the same pieces.
std::vector<Piece> pieces_of(const at::Tensor& k) {
  const auto bytes = 2 * k.numel() * static_cast<std::int64_t>(k.element_size());
  const auto wanted = std::clamp<std::int64_t>(bytes / kPieceBytes, 1, kMostPieces);
  const auto of_heads = static_cast<int>(std::min(wanted, k.size(1)));
  // An empty batch is one piece.
  const auto of_batch = static_cast<int>(
      std::clamp<std::int64_t>(wanted / of_heads, 1, std::max<std::int64_t>(1, k.size(0))));
  std::vector<Piece> pieces;
  for (int i = 0; i < of_batch; ++i)
    for (int j = 0; j < of_heads; ++j)
      pieces.push_back(
          {mesh::part_of(k.size(0), i, of_batch), mesh::part_of(k.size(1), j, of_heads)});
  return pieces;
}

// Keys and values of a piece, or their gradients, contiguous: [batch, kv_heads, local length,
// head_dim].
struct Pair {
  at::Tensor k;
  at::Tensor v;

  static Pair of(const Piece& piece, const at::Tensor& k, const at::Tensor& v) {
    return {piece.of(k).contiguous(), piece.of(v).contiguous()};
  }
  Pair empty_like() const { return {at::empty_like(k), at::empty_like(v)}; }
  Pair zeros_like(at::ScalarType type) const {
    const auto options = k.options().dtype(type);
    return {at::zeros(k.sizes(), options), at::zeros(v.sizes(), options)};
  }
};

// This rank's place in the ring.
struct Ring {
  comm::Communicator& group;
  comm::CallOptions options;

  int next() const { return (group.rank() + 1) % group.size(); }
  int previous() const { return (group.rank() + group.size() - 1) % group.size(); }
  int last_step() const { return group.size() - 1; }
  comm::Work pass_on(const Pair& to_next, const Pair& from_previous) const {
    return group.exchange({comm::send_to(next(), to_next.k), comm::send_to(next(), to_next.v),
                           comm::receive_from(previous(), from_previous.k),
                           comm::receive_from(previous(), from_previous.v)},
                          options);
  }
};

// Passes the other ranks' blocks, one at a time, each piece once around the ring: while one block
// is computed on, the next one is on its way. Every rank must ask for all of them.
class PassingBlocks {
 public:
  struct Block {
    Piece piece;
    int step = 0;   // steps that the block has travelled, from 1
    int owner = 0;  // the rank whose keys and values these are
    Pair keys;
  };

  // Starts to send the first piece.
  PassingBlocks(const Ring& ring, const at::Tensor& k, const at::Tensor& v)
      : ring_(ring), k_(k), v_(v), pieces_(pieces_of(k)) {
    send_for_next();
  }

  std::optional<Block> next() {
    if (piece_ == pieces_.size()) return std::nullopt;
    work_.wait();
    outgoing_ = {};
    current_ = std::move(incoming_);
    const Block block{
        .piece = pieces_[piece_],
        .step = step_,
        .owner = (ring_.group.rank() + ring_.group.size() - step_) % ring_.group.size(),
        .keys = current_};
    if (step_ < ring_.last_step()) {
      ++step_;
    } else {
      step_ = 1;
      ++piece_;
    }
    if (piece_ < pieces_.size()) send_for_next();
    return block;
  }

 private:
  // Passes on the block that was received, or sends our own piece on its way.
  void send_for_next() {
    outgoing_ = step_ > 1 ? current_ : Pair::of(pieces_[piece_], k_, v_);
    incoming_ = outgoing_.empty_like();
    work_ = ring_.pass_on(outgoing_, incoming_);
  }

  const Ring& ring_;
  at::Tensor k_, v_;
  std::vector<Piece> pieces_;
  std::size_t piece_ = 0;  // the piece that is on its way
  int step_ = 1;
  // Blocks are held until they have been sent, so that the thread that allocated their memory also
  // frees it.
  Pair current_, outgoing_, incoming_;
  comm::Work work_;
};

// Passes the gradients of blocks around the ring, one step behind the blocks: each rank adds its
// share and passes them on, and the last one sends them to the block's owner.
class PassingGradients {
 public:
  PassingGradients(const Ring& ring, const AttentionGradients& own) : ring_(ring), own_(own) {}

  // Adds this rank's share to a block's gradients and passes them on.
  void add(const PassingBlocks::Block& block, Pair share) {
    take_what_came(share);
    outgoing_ = std::move(share);
    incoming_ = outgoing_.empty_like();
    work_ = ring_.pass_on(outgoing_, incoming_);
    came_home_ = block.step == ring_.last_step();
    piece_ = block.piece;
  }

  void finish() { take_what_came({}); }

 private:
  // Adds the gradients that have come to the share of the next block or, if they are those of our
  // own block, to our gradients.
  void take_what_came(const Pair& share) {
    if (!incoming_.k.defined()) return;
    work_.wait();
    outgoing_ = {};
    (came_home_ ? piece_.of(own_.k) : share.k).add_(incoming_.k);
    (came_home_ ? piece_.of(own_.v) : share.v).add_(incoming_.v);
    incoming_ = {};
  }

  const Ring& ring_;
  const AttentionGradients& own_;
  Pair outgoing_, incoming_;
  bool came_home_ = false;
  Piece piece_;
  comm::Work work_;
};

at::Tensor positions_of(const at::Tensor& x, const mesh::Interval& rows) {
  return x.narrow(2, rows.begin, rows.size());
}

// The queries, keys and terms with which a rank computes on a block.
struct Share {
  BlockSight sight;
  AttentionTerms terms;
  std::int64_t heads_per_kv;
  const Piece& piece;

  at::Tensor of_queries(const at::Tensor& x) const {
    return positions_of(piece.of(x, heads_per_kv), sight.queries);
  }
  AttentionResult of_result(const AttentionResult& result) const {
    return {of_queries(result.output), of_queries(result.log_sum_exp)};
  }
  at::Tensor of_keys(const at::Tensor& x) const { return positions_of(x, sight.keys); }
};

Share share_of(const at::Tensor& q, const at::Tensor& k, const PassingBlocks::Block& block,
               const Ring& ring, const RingTerms& terms) {
  const auto sight =
      sight_of({.rank = ring.group.rank(), .size = ring.group.size(), .kind = terms.split},
               block.owner, q.size(2), terms.attention.causal);
  return {.sight = sight,
          .terms = {.causal = sight.causal, .scale = terms.attention.scale},
          .heads_per_kv = q.size(1) / k.size(1),
          .piece = block.piece};
}

}  // namespace

AttentionResult ring_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             comm::Communicator& group, const RingTerms& terms) {
  const Ring ring{group, {.subject = terms.subject}};
  PassingBlocks blocks(ring, k, v);
  // Our own keys come first. Their positions ascend, so the causal mask is that of a whole
  // sequence.
  const auto result = attend(q, k, v, terms.attention);
  while (const auto block = blocks.next()) {
    const auto share = share_of(q, k, *block, ring, terms);
    if (share.sight.empty()) continue;
    attend_more(share.of_result(result), share.of_queries(q), share.of_keys(block->keys.k),
                share.of_keys(block->keys.v), share.terms);
  }
  return result;
}

AttentionGradients ring_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const AttentionResult& result,
                                 comm::Communicator& group, const RingTerms& terms) {
  const Ring ring{group, {.subject = terms.subject}};
  PassingBlocks blocks(ring, k, v);
  const auto type = sum_type(q.scalar_type());
  const auto zeros = [&](const at::Tensor& like) { return empty_by_position(like, type).zero_(); };
  const AttentionGradients gradients{zeros(q), zeros(k), zeros(v)};
  add_gradients(gradients, grad, q, k, v, result, terms.attention);
  PassingGradients passing(ring, gradients);
  while (const auto block = blocks.next()) {
    const auto share = share_of(q, k, *block, ring, terms);
    auto added = block->keys.zeros_like(type);
    if (!share.sight.empty())
      add_gradients({.q = share.of_queries(gradients.q),
                     .k = share.of_keys(added.k),
                     .v = share.of_keys(added.v)},
                    share.of_queries(grad), share.of_queries(q), share.of_keys(block->keys.k),
                    share.of_keys(block->keys.v), share.of_result(result), share.terms);
    passing.add(*block, std::move(added));
  }
  passing.finish();
  return gradients;
}

}  // namespace lockstep::nn::internal

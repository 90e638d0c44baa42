#include <lockstep/parallel/pipeline/schedule/orders.h>

#include <algorithm>
#include <span>

namespace lockstep::pipeline {

namespace {

// `ahead` forwards, then backwards and forwards by turns, then the backwards that are left.
std::vector<Action> by_turns(std::span<const Action> forwards, std::span<const Action> backwards,
                             std::size_t ahead) {
  ahead = std::min(ahead, forwards.size());
  std::vector<Action> actions(forwards.begin(), forwards.begin() + static_cast<long>(ahead));
  for (std::size_t i = 0; i < backwards.size(); ++i) {
    actions.push_back(backwards[i]);
    if (ahead + i < forwards.size()) actions.push_back(forwards[ahead + i]);
  }
  return actions;
}

std::vector<Action> each_micro_batch(ActionKind kind, int stage, int num_micro_batches) {
  std::vector<Action> actions;
  for (int i = 0; i < num_micro_batches; ++i) actions.push_back({kind, stage, i});
  return actions;
}

// Micro-batches go through the chunks in rounds of at least as many as there are ranks, so that the
// first is back at the first rank when the last has left it; of nearly the same size, larger first.
std::vector<int> round_sizes(int num_ranks, int num_micro_batches) {
  const int rounds = std::max(1, num_micro_batches / num_ranks);
  std::vector<int> sizes;
  for (int i = 0; i < rounds; ++i)
    sizes.push_back(num_micro_batches / rounds + (i < num_micro_batches % rounds ? 1 : 0));
  return sizes;
}

// The list of a rank of ZB-V. It is made for no fewer micro-batches than fill the pipeline; what is
// too many is left out.
class VShapedRank {
 public:
  VShapedRank(int num_ranks, int rank, int num_micro_batches)
      : down_{.stage = rank}, up_{.stage = 2 * num_ranks - 1 - rank}, most_(num_micro_batches) {
    const int made_for = std::max(num_micro_batches, 2 * num_ranks - 1);
    // As many as start before the first is back on its way up.
    for (int i = 0; i < 2 * (num_ranks - rank) - 1; ++i) forward(down_);
    for (int i = 0; i < rank; ++i) {
      forward(up_);
      forward(down_);
    }
    // Then the first backwards, which come from the top.
    for (int i = 0; i < num_ranks - rank; ++i) {
      forward(up_);
      backward(up_);
    }
    for (int i = 0; i < made_for - num_ranks; ++i) {
      forward(down_);
      backward(down_);
      forward(up_);
      backward(up_);
    }
    for (int i = 0; i < rank; ++i) {
      backward(down_);
      backward(up_);
    }
    for (int i = 0; i < num_ranks - rank; ++i) backward(down_);
  }

  std::vector<Action> take() { return std::move(actions_); }

 private:
  struct Chunk {
    int stage;
    int forwards = 0;
    int backwards = 0;
  };

  void forward(Chunk& chunk) { add(ActionKind::forward, chunk.stage, chunk.forwards++); }
  void backward(Chunk& chunk) { add(ActionKind::backward_input, chunk.stage, chunk.backwards++); }
  void add(ActionKind kind, int stage, int micro_batch) {
    if (micro_batch < most_) actions_.push_back({kind, stage, micro_batch});
  }

  Chunk down_;
  Chunk up_;
  int most_;
  std::vector<Action> actions_;
};

}  // namespace

Order gpipe_order(int num_ranks, int num_micro_batches) {
  Order order;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto backwards = each_micro_batch(ActionKind::backward, rank, num_micro_batches);
    order.push_back(by_turns(each_micro_batch(ActionKind::forward, rank, num_micro_batches),
                             backwards, backwards.size()));
  }
  return order;
}

Order one_forward_one_backward_order(int num_ranks, int num_micro_batches, ActionKind backward) {
  Order order;
  for (int rank = 0; rank < num_ranks; ++rank)
    order.push_back(by_turns(each_micro_batch(ActionKind::forward, rank, num_micro_batches),
                             each_micro_batch(backward, rank, num_micro_batches),
                             static_cast<std::size_t>(num_ranks - rank)));
  return order;
}

Order interleaved_order(int num_ranks, int num_micro_batches, int num_chunks) {
  const auto sizes = round_sizes(num_ranks, num_micro_batches);
  Order order;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<Action> forwards;
    std::vector<Action> backwards;
    int first = 0;
    for (const int size : sizes) {
      for (int chunk = 0; chunk < num_chunks; ++chunk)
        for (int i = first; i < first + size; ++i) {
          const int last = num_chunks - 1 - chunk;
          forwards.push_back({ActionKind::forward, chunk * num_ranks + rank, i});
          backwards.push_back({ActionKind::backward, last * num_ranks + rank, i});
        }
      first += size;
    }
    // Until the first micro-batch has gone through all later stages and is back, two of its stages
    // a rank pass by in the time of one forward and one backward.
    const int ahead = (num_chunks - 1) * sizes.front() + 2 * (num_ranks - 1 - rank) + 1;
    order.push_back(by_turns(forwards, backwards, static_cast<std::size_t>(ahead)));
  }
  return order;
}

Order v_shaped_order(int num_ranks, int num_micro_batches) {
  Order order;
  for (int rank = 0; rank < num_ranks; ++rank)
    order.push_back(VShapedRank(num_ranks, rank, num_micro_batches).take());
  return order;
}

}  // namespace lockstep::pipeline

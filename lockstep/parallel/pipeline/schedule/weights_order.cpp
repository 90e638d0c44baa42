#include <deque>
#include <limits>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/orders.h>

namespace lockstep::pipeline {

namespace {

// Runs an order in steps of one action a rank.
class StepByStep {
 public:
  StepByStep(const Order& order, std::size_t num_stages, int num_micro_batches, int most_live)
      : order_(order),
        num_stages_(static_cast<int>(num_stages)),
        num_micro_batches_(static_cast<std::size_t>(num_micro_batches)),
        most_live_(most_live),
        forward_done_(num_stages * num_micro_batches_, kNever),
        input_done_(forward_done_),
        ranks_(order.size()),
        result_(order.size()) {}

  Order run() {
    bool left = true;
    for (int now = 0; left; ++now) {
      left = false;
      bool any = false;
      for (std::size_t rank = 0; rank < order_.size(); ++rank) {
        any |= step(rank, now);
        left |= ranks_[rank].next < order_[rank].size() || !ranks_[rank].weights.empty();
      }
      LOCKSTEP_CHECK(any || !left, "no rank can go on at step {}", now);
    }
    return std::move(result_);
  }

 private:
  struct Rank {
    std::size_t next = 0;
    int live = 0;
    std::deque<Action> weights;  // that are left to do
  };
  static constexpr int kNever = std::numeric_limits<int>::max();

  std::size_t index(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * num_micro_batches_ +
           static_cast<std::size_t>(micro_batch);
  }

  bool is_ready(const Action& action, int now) const {
    const int stage = action.stage;
    if (action.kind == ActionKind::forward)
      return stage == 0 || forward_done_[index(stage - 1, action.micro_batch)] <= now;
    return forward_done_[index(stage, action.micro_batch)] <= now &&
           (stage == num_stages_ - 1 || input_done_[index(stage + 1, action.micro_batch)] <= now);
  }

  bool step(std::size_t at, int now) {
    Rank& rank = ranks_[at];
    if (rank.next < order_[at].size()) {
      const Action& action = order_[at][rank.next];
      const bool forward = action.kind == ActionKind::forward;
      if (is_ready(action, now) && !(forward && rank.live >= most_live_)) {
        result_[at].push_back(action);
        ++rank.next;
        const std::size_t place = index(action.stage, action.micro_batch);
        if (forward) {
          ++rank.live;
          forward_done_[place] = now + 1;
        } else {
          input_done_[place] = now + 1;
          rank.weights.push_back({ActionKind::backward_weight, action.stage, action.micro_batch});
        }
        return true;
      }
    }
    if (rank.weights.empty()) return false;
    result_[at].push_back(rank.weights.front());
    rank.weights.pop_front();
    --rank.live;
    return true;
  }

  const Order& order_;
  int num_stages_;
  std::size_t num_micro_batches_;
  int most_live_;
  std::vector<int> forward_done_;  // the step after it
  std::vector<int> input_done_;
  std::vector<Rank> ranks_;
  Order result_;
};

}  // namespace

Order with_weights(const Order& order, std::size_t num_stages, int num_micro_batches,
                   int most_live) {
  return StepByStep(order, num_stages, num_micro_batches, most_live).run();
}

}  // namespace lockstep::pipeline

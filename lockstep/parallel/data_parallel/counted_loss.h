// Losses that are sums over samples, so that gradients can be divided by the samples of all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/data_parallel/model_state.h>

namespace lockstep::data_parallel {

// Which of several models has a backward(loss_sum, count) under way: shared by those that may meet
// in one graph.
using CountedPass = std::shared_ptr<std::atomic<const void*>>;

// Says that a counted pass of `model` is under way, for as long as it lives.
class [[nodiscard]] CountedPassGuard {
 public:
  CountedPassGuard(const CountedPass& pass, const void* model) : pass_(*pass) { pass_ = model; }
  ~CountedPassGuard() { pass_ = nullptr; }
  CountedPassGuard(const CountedPassGuard&) = delete;
  CountedPassGuard& operator=(const CountedPassGuard&) = delete;

 private:
  std::atomic<const void*>& pass_;
};

// The sum of losses over `count` samples, or over whatever else the loss counts.
struct CountedSum {
  at::Tensor loss_sum;
  std::int64_t count = 0;
};

// UsageError where a loss is no sum over so many samples: not one number, or none of some samples.
void check_counted_loss(const at::Tensor& loss_sum, std::int64_t count);

// The samples and losses of this rank's passes since the last exchange, and what they come to over
// all ranks.
class CountedLoss {
 public:
  // `device` is where the parameters are.
  void add(const at::Tensor& loss_sum, std::int64_t count, c10::Device device);
  // Whether anything was added since clear().
  bool any() const { return loss_sum_.defined(); }

  // Starts to sum over the ranks; the totals are there once finish() has been called.
  void exchange(comm::Communicator& group);
  void finish();
  const StepTotals& totals() const { return totals_; }

  // The divisor of sums over ranks, for a call that comes after exchange(): on the CPU, where the
  // host need not know it yet.
  bool divides_in_flight() const { return totals_.values.is_cpu(); }
  at::Tensor divisor() const;
  // The same for sums that are there, after finish(). A step without a sample has no gradient.
  void divide(at::Tensor& sums) const;

  // The passes of the next step begin.
  void clear();

 private:
  std::int64_t count_ = 0;
  at::Tensor loss_sum_;  // undefined where nothing was added
  StepTotals totals_;
  comm::Work work_;
};

}  // namespace lockstep::data_parallel

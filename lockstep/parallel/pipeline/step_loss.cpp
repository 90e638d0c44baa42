#include <lockstep/parallel/pipeline/step_loss.h>

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

StepLoss::StepLoss(std::shared_ptr<comm::Communicator> group, int rank, int num_micro_batches,
                   c10::Device device)
    : group_(std::move(group)),
      rank_(rank),
      num_micro_batches_(num_micro_batches),
      device_(device) {}

StepLoss::~StepLoss() {
  try {
    telling_.wait_on_host();
  } catch (const CommError&) {
    // Of a group that has ended: whoever used it knows.
  }
}

void StepLoss::begin() {
  sum_ = at::Tensor();
  num_added_ = 0;
  is_told_ = false;
}

void StepLoss::add(const at::Tensor& loss) {
  const at::Tensor wide = loss.detach().reshape({}).to(at::kDouble);
  sum_ = sum_.defined() ? sum_ + wide : wide;
  // Not where the host would have to wait for a GPU that has yet to compute it.
  const bool at_once = device_.is_cpu();
  if (++num_added_ == num_micro_batches_ && at_once) tell();
}

void StepLoss::tell() {
  telling_.wait();
  sum_ = sum_.cpu();
  std::vector<comm::Transfer> sends;
  for (int rank = 0; rank < group_->size(); ++rank)
    if (rank != rank_) sends.push_back(comm::send_to(rank, sum_));
  if (!sends.empty()) telling_ = group_->exchange(std::move(sends));
  is_told_ = true;
}

double StepLoss::of_all_ranks() {
  if (group_->rank() == rank_) {
    if (!is_told_) tell();
    return sum_.item<double>();
  }
  const at::Tensor sum = at::empty({}, at::kDouble);
  group_->exchange({comm::receive_from(rank_, sum)}).wait();
  return sum.item<double>();
}

}  // namespace lockstep::pipeline

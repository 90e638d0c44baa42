// The second run of a function that is recomputed.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <lockstep/intercept/backward.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/slots.h>

namespace lockstep::activations {

// Fills the slots that are wanted, in the order of the first run, and takes the results that the
// first run kept. Refers to both. Threading: one thread.
class SecondRun : public intercept::SavedTensorHooks, public ResultKeeper {
 public:
  SecondRun(std::vector<Slot>& slots, const std::vector<KeptResult>& results,
            const OperationKinds& kinds);

  // Calls the function under these hooks until the last slot that is wanted is filled. UsageError
  // where it does something else than the first time.
  void run(const std::function<void()>& function);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override;

  bool keeps(OperationKind kind) const override { return kinds_.contains(kind); }
  at::Tensor result(OperationKind kind, const std::vector<at::Tensor>& arguments,
                    const std::function<at::Tensor()>& operation) override;

 private:
  class Saved;

  bool complete() const { return next_ >= end_; }
  void save(const at::Tensor& tensor);
  void end_if_complete() const;

  std::vector<Slot>& slots_;
  const std::vector<KeptResult>& results_;
  const OperationKinds& kinds_;
  std::size_t next_ = 0;  // slot
  std::size_t end_ = 0;   // of the slots to be filled
  std::size_t next_result_ = 0;
};

}  // namespace lockstep::activations

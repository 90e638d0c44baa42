// Keeps optimizers that know nothing of ranks from stepping on gradients that were never summed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// While gradients of passes under no_sync() wait to be summed, operators that change a parameter
// from what it was (add_, addcdiv_) are refused: an optimizer of LibTorch's would step on this
// rank's gradients alone. Operators that put other values in its place (copy_, set_data, normal_)
// are not, nor is anything once the gradients are dropped or zeroed. A program loads a model so;
// but one that puts other values there again after a further such pass is taking steps, and is
// refused, too.
//
// Parameters carry our key (intercept/owner.h) only while gradients wait, so that nothing else pays
// for it. A tensor that was made from a parameter before, without a copy, is not watched.
//
// Ownership: shares the parameters. Threading: the operators may run on any thread; the rest is
// called by one thread at a time, and never while a parameter is written to.
class WriteGuard final : public intercept::Owner, public std::enable_shared_from_this<WriteGuard> {
 public:
  // `on_refusal` is called before an error is thrown.
  WriteGuard(std::vector<NamedTensor> parameters,
             std::function<void(const UsageError&)> on_refusal);
  ~WriteGuard() override;

  // A backward pass begins that leaves gradients on the rank.
  void watch();
  // A backward pass begins, of either kind.
  void begin_pass() { is_noted_ = false; }
  // This pass has left a gradient of a parameter on the rank.
  void note_gradient(std::size_t parameter);
  // No gradient waits any more.
  void end();
  // All ranks have given the parameters the same values.
  void forget_writes();

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  bool only_listens() const override { return true; }

 private:
  struct Watched {
    NamedTensor parameter;
    // Where the parameter was when this became an owner of its memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
    bool tagged_here = false;
    bool waits = false;  // a gradient of it has come since the last exchange
    // After how many passes since the last exchange it was given other values while a gradient
    // waited; 0 if it was not.
    std::int64_t replaced_after = 0;
  };

  // Whose values an operator is about to write, while a gradient that is not zero waits.
  Watched* waiting_at(const at::Tensor& written);
  void refuse_step(const intercept::Call& call, const Watched& parameter) const;
  void note_replacement(const intercept::Call& call, Watched& parameter) const;
  [[noreturn]] void refuse(const UsageError& error) const;

  std::vector<Watched> all_;
  std::function<void(const UsageError&)> on_refusal_;
  std::int64_t num_passes_ = 0;    // whose gradients wait
  std::int64_t num_unsummed_ = 0;  // since the last exchange, also those whose gradients are gone
  bool is_noted_ = false;          // this pass is one of them
  bool is_watching_ = false;
};

}  // namespace lockstep::data_parallel

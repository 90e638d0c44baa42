// When gradients are exchanged: at the end of which backward passes, and over how many samples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/same_values.h>

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

// Passes come in two kinds: the caller's own loss.backward(), at whose end the mean over the ranks
// is taken, and backward(loss_sum, count) here. A graph that runs another backward inside its own
// (reentrant checkpoints) exchanges once in the second, and at the end of each in the first. What
// the ranks send each other is for those to say that derive from this.
//
// Before every backward pass of the process, whichever model's it is, it looks at its own: nothing
// that was done to a model may leave its gradients on each rank unnoticed. A pass that does not
// reach the model goes on, whatever was done to it. Until gradients of passes under no_sync() are
// exchanged, steps of optimizers that know nothing of it are refused (WriteGuard). Ranks that wait
// for one which has refused are told why it does not come (flight::Refusal).
//
// Ownership: not the model. Once this is gone, a backward pass that reaches the model's parameters
// throws, whatever is left of the model. Threading: backward passes one at a time, on any threads
// of autograd. Failure: UsageError and CommError come out of the backward() during which they
// happen.
class GradientExchange : public intercept::PassListener,
                         public std::enable_shared_from_this<GradientExchange> {
 public:
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // Whether backward passes may exchange gradients at their end (NoSync).
  void set_exchange(bool on);
  bool exchange_is_on() const { return exchange_; }
  // Whether further passes of the step follow those that run now (Accumulation).
  void set_more_passes(bool on);
  bool more_passes() const { return more_passes_; }
  // Whether gradients of passes that others follow are exchanged, too, or after the last.
  void exchange_each_pass(bool on) { exchanges_each_pass_ = on; }

  // Backward of a loss that is a sum over `count` samples: the exchange divides the summed
  // gradients by the samples of all ranks, and of all passes since the last exchange, and not by
  // the number of ranks. All ranks do this in a step, or none.
  void backward(const at::Tensor& loss_sum, std::int64_t count);

  // The same of a step whose backward passes `passes` runs, all of them, and whose losses it
  // returns the sum of: those of a pipeline's micro-batches. They are exchanged after the last.
  void backward_passes(const std::function<CountedSum()>& passes);

  // The totals of the last exchange that ended a backward().
  const StepTotals& totals() const { return loss_.totals(); }
  std::int64_t num_exchanges() const { return num_exchanges_; }

  // Follows what was done to the model since it was looked at last; UsageError for what would train
  // it on each rank by itself, unnoticed. Between passes.
  void check_model();
  // Whether anybody can still use the model, or a part of it.
  bool any_part_lives() const { return registered_.any_part_lives(); }

  // Runs a check, and tells ranks that wait for this one what it throws.
  template <typename Check>
  void run_check(const Check& check) const {
    try {
      check();
    } catch (const UsageError& error) {
      group_->note_refusal(error.what());
      throw;
    }
  }

  // An optimizer has dropped gradients, from the parts that parameters stand for or from the
  // parameters: both are without from now on, and passes of which nothing is left count no more.
  void follow_dropped();

  // Ranks that hold the same parameters compare them at the first exchange and every `exchanges`
  // after it; never where that is 0.
  void check_consistency_every(std::int64_t exchanges) { consistency_interval_ = exchanges; }

  void before_pass(const intercept::Pass& pass) override;
  void before_inner_pass(const intercept::Pass& pass) override;

 protected:
  // All ranks' group, and where the parameters are.
  GradientExchange(const RegisteredParameters& registered,
                   std::shared_ptr<comm::Communicator> group, c10::Device device,
                   CountedPass counted_pass);

  // Begins to look at the model before every pass, and at what is written to `trained`, which are
  // in the order of hear_of()'s indices.
  void listen(std::vector<NamedTensor> trained);
  // When this object goes: makes later gradients of the parameter an error, as no rank would sum
  // them.
  void leave(const at::Tensor& parameter) const noexcept;

  // Whether a pass exchanges gradients at its end, or adds to what is on the rank.
  bool exchange() const { return exchange_ && (!more_passes_ || exchanges_each_pass_); }
  // Whether this exchange leaves sums that are not divided yet, as further passes follow.
  bool is_partial() const { return more_passes_ && loss_.any(); }
  // Whether gradients are such sums, of earlier passes of this step.
  bool has_partial_sums() const { return has_partial_sums_; }
  // The passes whose sums are there were given up: their gradients are gone.
  void forget_passes();

  // Calls on_gradient(index), with the mutex locked, whenever a pass has added to the gradient.
  std::unique_ptr<intercept::GradientHook> hear_of(const at::Tensor& parameter, std::size_t index);
  // The same in place of a hook that hears no more, because the parameter was converted. A pass
  // over a graph from before is refused: it would leave a gradient that nobody hears of.
  void hear_again(std::unique_ptr<intercept::GradientHook>& hook, const std::string& name,
                  const at::Tensor& parameter, std::size_t index);

  // The functions below are called with the mutex locked.
  // As check_model(), which has looked at what is registered.
  virtual void check_parameters() = 0;
  virtual void on_gradient(std::size_t index, const at::Tensor& arrived) = 0;
  // Ends an exchange; calls end_pass().
  virtual void finish() = 0;
  // A counted pass begins, and gradients are sums that its own must not be added to by autograd.
  virtual void set_sums_aside() {}
  // An optimizer may have dropped gradients.
  virtual void forget_dropped() {}
  // Before the first counted pass of a step: UsageError, by refuse_unzeroed(), for a gradient that
  // is left of what was before.
  virtual void check_zeroed() const = 0;

  // UsageError for a gradient that cannot be summed over ranks, or not with others of its step.
  void check_gradient(const std::string& name, const at::Tensor& gradient) const;
  [[noreturn]] void refuse_unzeroed(const std::string& name) const;
  [[noreturn]] static void refuse_second(const std::string& name);

  // A gradient has come in a pass that exchanges nothing.
  void wait_for_exchange(std::size_t index) { writes_->note_gradient(index); }
  // The caller has given the parameters other values, on all ranks alike.
  void forget_writes() { writes_->forget_writes(); }
  // A gradient has come in a pass that exchanges: at the first of them the exchange begins, where
  // it is the caller's own pass.
  void enter_pass();
  bool is_counted_pass() const { return counted_pass_->load() == this; }
  bool divides_by_count() const { return loss_.any(); }
  // The exchange is over, and with it the step unless it is partial. Returns whether a gradient had
  // come in its pass.
  bool end_pass();

  comm::Communicator& group() const { return *group_; }
  c10::Device device() const { return device_; }
  void set_device(c10::Device device) { device_ = device; }
  bool checks_consistency() const { return consistency_interval_ > 0; }
  // Whether ranks compare their parameters at this exchange, as far as its number says.
  bool consistency_check_is_due() const {
    return checks_consistency() && num_exchanges_ % consistency_interval_ == 0;
  }

  std::mutex mutex_;
  CountedLoss loss_;                  // of backward() since the last exchange
  bool in_backward_ = false;          // a gradient has come in this pass, which exchanges
  bool has_plain_gradients_ = false;  // of a caller's own backward(), not zeroed since
  bool exchanges_each_pass_ = false;  // also those that others follow
  bool cuts_sums_ = false;            // so that no optimizer of LibTorch's can step on them

 private:
  // The hook of a parameter that was converted while a graph led to it.
  struct Dropped {
    std::string name;
    std::unique_ptr<intercept::GradientHook> hook;
  };

  void look_at_model();
  void look_before(const intercept::Pass& pass);
  void refuse_gone(const intercept::Pass& pass) const;
  // Why nobody sums the gradients of a parameter any more.
  std::string why_left() const;
  void refuse_converted(const intercept::Pass& pass);
  void begin_pass();
  void begin();
  void end_exchange();
  // Before the first pass of a backward().
  void check_before();

  RegisteredParameters registered_;
  std::shared_ptr<comm::Communicator> group_;
  c10::Device device_;
  CountedPass counted_pass_;
  std::int64_t consistency_interval_ = kConsistencyCheckInterval;
  bool exchange_ = true;
  bool more_passes_ = false;
  bool has_partial_sums_ = false;
  bool broken_ = false;  // a backward() here ended in an exception
  // Why a pass that reaches the model is refused, as of the last look at it.
  std::exception_ptr refusal_;
  std::vector<Dropped> dropped_;
  std::shared_ptr<WriteGuard> writes_;
  std::int64_t num_exchanges_ = 0;
};

}  // namespace lockstep::data_parallel

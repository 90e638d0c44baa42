// A call whose saved tensors are computed again when backward asks for them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <lockstep/intercept/backward.h>
#include <lockstep/recompute/autocast_state.h>
#include <lockstep/recompute/buffer_values.h>
#include <lockstep/recompute/generator_states.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/slots.h>

namespace lockstep::activations {

// Whether this thread runs a function for the second time, to compute what backward needs: for
// code that counts its calls, or prefetches in their order.
bool is_recomputing();

// Returns a function that sets something back to what it is now.
using Snapshot = std::function<std::function<void()>()>;

// What a function finds besides its inputs, and may change or find changed.
struct Surroundings {
  std::vector<at::Tensor> buffers;
  Snapshot snapshot;  // of anything else; may be empty
};

// The first run builds autograd's graph like any other, but instead of a tensor its nodes keep the
// tensor's number among those that the run saves. The first node of a backward pass to ask for its
// tensor has the function run again, with the inputs, random numbers, autocast and surroundings
// of the first run; that run ends as soon as it has saved the last tensor that is still wanted, and
// its own graph is thrown away. Each tensor leaves when its node has taken it.
//
// Backward therefore goes through one graph, the one a plain run has: gradients are summed in the
// same order, hooks of parameters fire once, and gradients of gradients are there. Parameters are
// kept as they are.
//
// Ownership: the nodes of the first run share it; it owns the inputs, saved by the hooks that were
// in force outside of it, so that regions nest and inputs may be offloaded. Threading: nodes may
// ask from any threads of autograd. Failure: UsageError where the function changes its inputs, or
// does something else the second time; what the function throws comes out of backward().
class Region : public std::enable_shared_from_this<Region> {
 public:
  using Function = std::function<void(const std::vector<at::Tensor>& inputs)>;

  // Remembers the state of this thread and the surroundings as the function will find them.
  Region(const std::vector<at::Tensor>& inputs, const Surroundings& surroundings,
         Function function);

  // While it lives, what is saved on this thread belongs to the region.
  class FirstRun {
   public:
    explicit FirstRun(std::shared_ptr<Region> region);
    ~FirstRun();
    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

    // To be called after the function has returned.
    void finish();

   private:
    class Hooks;

    std::shared_ptr<Region> region_;
    std::unique_ptr<Hooks> hooks_;
    intercept::HookScope scope_;
    KeeperScope keeper_;
    bool finished_ = false;
  };

 private:
  class Number;
  class AsInFirstRun;

  std::size_t add_slot(const at::Tensor& saved);
  at::Tensor take(std::size_t number);
  void forget(std::size_t number);
  void drop_tensors();
  void run_again();

  Function function_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<at::Tensor> watched_;  // the inputs, during the first run
  std::vector<std::int64_t> versions_;
  GeneratorStates generators_;
  AutocastState autocast_;
  BufferValues buffers_;
  Snapshot snapshot_;
  std::function<void()> restore_;
  OperationKinds kinds_;

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<KeptResult> results_;
  // Of the operation that the first run is in, where its result is kept.
  const std::vector<at::Tensor>* arguments_ = nullptr;
};

}  // namespace lockstep::activations

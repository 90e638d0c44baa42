// Activation checkpointing: the tensors that a function saves for backward are not kept, and
// backward computes them again. It saves memory, costs time, and gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <lockstep/intercept/backward.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/saved_tensor.h>
#include <lockstep/recompute/surroundings.h>

namespace lockstep {

namespace activations {

// A tensor that the first run saved for backward.
struct Slot {
  c10::DimVector sizes;
  c10::ScalarType dtype{};
  bool wanted = true;   // its node still exists and may ask for it
  at::Tensor tensor{};  // between the second run and when its node takes it
  // An operation whose result is kept also keeps the tensors that it made for itself.
  KeptTensor kept{};
  // If the node saved a view of one of the operation's arguments: which argument, and how the view
  // lies in its storage.
  std::size_t argument = 0;
  std::optional<View> part{};

  bool recomputed() const { return !kept.defined(); }
};

// The result of an operation of the first run; the operation saved the slots from first_slot up to
// end_slot.
struct KeptResult {
  std::size_t first_slot;
  std::size_t end_slot;
  KeptTensor result;  // undefined if the function then changed it: it is computed again
  bool requires_grad;
  std::optional<GeneratorStates> generators;  // after an operation that may draw random numbers
};

// Whether this thread runs a function for the second time, to compute tensors for backward. Code
// that counts calls or prefetches in their order needs to know this.
bool is_recomputing();

// Takes a snapshot of some state, and returns a function that puts it back.
using Snapshot = std::function<std::function<void()>()>;

// State besides its inputs that a function reads, and that it or other code may change.
struct Surroundings {
  std::vector<at::Tensor> buffers = {};
  Snapshot snapshot;  // for any other state; may be empty
};

// A call whose saved tensors are computed again when backward asks for them.
//
// The first run builds autograd's graph as usual, but its nodes keep the number of each saved
// tensor instead of the tensor. When the first node of a backward pass asks for its tensor, the
// function runs again, with the inputs, random numbers, autocast and surroundings of the first run.
// That run ends as soon as it has saved the last tensor that is still wanted, and its own graph is
// thrown away. Each tensor is released when its node has taken it.
//
// Backward therefore goes through the same graph as in a plain run: gradients are summed in the
// same order, hooks of parameters fire once, and gradients of gradients work. Parameters are kept
// as they are.
//
// Ownership: the nodes of the first run share it. It owns the inputs, which are saved by the hooks
// in force outside of it, so that regions nest and inputs may be offloaded. Threading: nodes may
// ask on any of autograd's threads. Failure: UsageError if the function changes its inputs, or does
// something else the second time; backward() throws the function's exceptions.
class Region : public std::enable_shared_from_this<Region> {
 public:
  using Function = std::function<void(const std::vector<at::Tensor>& inputs)>;

  // Takes the state of this thread and the surroundings as the function will find them.
  Region(const std::vector<at::Tensor>& inputs, const Surroundings& surroundings,
         Function function);

  // While it lives, tensors that are saved on this thread belong to the region.
  class FirstRun {
   public:
    explicit FirstRun(std::shared_ptr<Region> region);
    ~FirstRun();
    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

    // Must be called after the function has returned.
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
  // The arguments of the operation that the first run is in, if its result is kept.
  const std::vector<at::Tensor>* arguments_ = nullptr;
};

template <typename T>
constexpr bool is_vector = false;
template <typename T, typename Allocator>
constexpr bool is_vector<std::vector<T, Allocator>> = true;

// Visits a tensor, and the tensors in vectors, optionals, tuples, pairs and arrays.
template <typename T, typename Visit>
void each_tensor(T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... element) { (each_tensor(element, visit), ...); }, value);
  } else if constexpr (requires { value.has_value(), value.value(); }) {
    if (value.has_value()) each_tensor(value.value(), visit);
  } else if constexpr (is_vector<T> && !std::is_same_v<T, std::vector<bool>>) {
    for (auto& element : value) each_tensor(element, visit);
  }
}

template <typename Fn>
constexpr bool is_module = requires(Fn& fn) {
  fn->named_buffers();
};

template <typename Fn, typename... Inputs>
decltype(auto) call(Fn& fn, const Inputs&... inputs) {
  if constexpr (is_module<Fn>)
    return fn->forward(inputs...);
  else
    return fn(inputs...);
}

template <typename Fn, typename... Inputs>
auto recompute_in(Surroundings surroundings, Fn fn, const Inputs&... inputs) {
  if (!c10::GradMode::is_enabled()) return call(fn, inputs...);
  if constexpr (is_module<Fn>) surroundings.buffers = fn->buffers();

  // The region saves the tensors; the copy of the arguments has gaps that the second run fills.
  std::tuple<std::decay_t<Inputs>...> arguments(inputs...);
  std::vector<at::Tensor> tensors;
  each_tensor(arguments, [&](at::Tensor& tensor) { tensors.push_back(std::move(tensor)); });
  auto again = [fn, arguments](const std::vector<at::Tensor>& saved) mutable {
    auto filled = arguments;
    std::size_t next = 0;
    each_tensor(filled, [&](at::Tensor& tensor) { tensor = saved[next++]; });
    std::apply([&](const auto&... argument) { call(fn, argument...); }, filled);
  };

  Region::FirstRun run(std::make_shared<Region>(tensors, surroundings, std::move(again)));
  auto result = call(fn, inputs...);
  run.finish();
  return result;
}

}  // namespace activations

// Calls fn(inputs…), or fn->forward(inputs…) if fn is a module or a shared_ptr to one. Outputs and
// gradients have the bits of a plain call, dropout included. The tensors saved inside are not kept,
// and backward calls fn once more. Without grad mode it is a plain call.
//
//   x = lockstep::recompute(block, x);
//   x = lockstep::recompute([=](const torch::Tensor& x) { return block->forward(x, mask); }, x);
//
// Calls nest, and may stand in any module's forward. Inputs and results may have any type. Pass
// tensors as inputs rather than captures: nested calls and offload keep less of them.
//
// fn is copied and called again in backward, on a thread of autograd, so everything that it refers
// to must still exist. It must do the same again: random numbers from LibTorch's global generators,
// autocast and, if fn is a module, its buffers are as they were the first time, and afterwards as
// if there had been no second call. State that a function keeps elsewhere, such as the batch norm
// of a module that it captures, is changed twice: pass the module itself as fn. An exception that
// is no std::exception ends the second call as soon as backward has the tensors that it needs. See
// Region for failures.
template <typename Fn, typename... Inputs>
auto recompute(Fn fn, const Inputs&... inputs) {
  return activations::recompute_in({}, std::move(fn), inputs...);
}

}  // namespace lockstep

namespace lockstep::names {

using lockstep::recompute;

}  // namespace lockstep::names

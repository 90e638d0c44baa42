// Activation checkpointing: what a function computes on its way is not kept for backward, which
// computes it again. Memory for time, and the same bits.
#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <lockstep/recompute/region.h>

namespace lockstep {

namespace activations {

template <typename T>
constexpr bool is_vector = false;
template <typename T, typename Allocator>
constexpr bool is_vector<std::vector<T, Allocator>> = true;

// Visits a tensor, and those in vectors, optionals, tuples, pairs and arrays.
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

  // The region saves the tensors, and the function is left with gaps to fill in.
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

// Calls fn(inputs…), or fn->forward(inputs…) where fn is a module or a shared_ptr to one. Outputs
// and gradients have the bits of a plain call, dropout included; what is saved in between is not
// kept, and backward calls fn once more. Without grad mode it is a plain call.
//
//   x = lockstep::recompute(block, x);
//   x = lockstep::recompute([=](const torch::Tensor& x) { return block->forward(x, mask); }, x);
//
// Calls nest, and may stand in any module's forward. Inputs and results are of any type; tensors
// are best given as inputs, since a region within another, and offload, keep less of those than of
// tensors that fn holds.
//
// fn is copied and called again in backward, on a thread of autograd: what it refers to must still
// be there. It must do the same again; random numbers from LibTorch's global generators, autocast
// and, where fn is a module, its buffers are as they were the first time, and afterwards as if
// there had been no second. State that a function keeps elsewhere (batch norm of a module that it
// captures) is changed twice: give the module itself as fn. The second call ends by an exception
// of no standard type as soon as backward has what it needs. See Region for failures.
template <typename Fn, typename... Inputs>
auto recompute(Fn fn, const Inputs&... inputs) {
  return activations::recompute_in({}, std::move(fn), inputs...);
}

}  // namespace lockstep

namespace lockstep::names {

using lockstep::recompute;

}  // namespace lockstep::names

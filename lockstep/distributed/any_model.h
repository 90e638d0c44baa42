// The ways in which programs hand over a model: a module holder (TORCH_MODULE), a shared_ptr, a
// function that makes it, or a module by value.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep::internal {

template <typename Model>
concept PlainModule = std::derived_from<Model, torch::nn::Module>;

// Not derived_from: holders derive from it in private.
template <typename Model>
concept ModuleHolder = std::is_base_of_v<torch::detail::ModuleHolderIndicator, Model>;

// A module that lies elsewhere and stays there.
template <typename Model>
concept SharedModel =
    ModuleHolder<Model> || std::convertible_to<Model, std::shared_ptr<torch::nn::Module>>;

template <typename Make>
concept ModelFactory = !PlainModule<std::remove_cvref_t<Make>> &&
                       !SharedModel<std::remove_cvref_t<Make>> && std::invocable<Make>;

template <typename Model, typename... Args>
inline constexpr bool is_model_itself = sizeof...(Args) == 1 &&
                                        (... && std::same_as<std::remove_cvref_t<Args>, Model>);

// The arguments are a constructor's, and not another model to take over.
template <typename Model, typename... Args>
concept BuiltFrom = !is_model_itself<Model, Args...> && (PlainModule<Model> || ModuleHolder<Model>);

// Calls a factory. A module that it returns by value is constructed where it stays: what its
// constructor keeps of `this` goes on to be right.
template <ModelFactory Make>
auto made_in_place(Make&& make) {
  using Made = std::invoke_result_t<Make>;
  if constexpr (PlainModule<std::remove_cvref_t<Made>>) {
    using Module = std::remove_cvref_t<Made>;
    return std::shared_ptr<Module>(new Module(std::invoke(std::forward<Make>(make))));
  } else {
    return std::invoke(std::forward<Make>(make));
  }
}

// The same model as something that can be shared: a module by value is moved into a shared_ptr.
template <typename Model>
auto share_model(Model model) {
  if constexpr (PlainModule<Model>)
    return std::make_shared<Model>(std::move(model));
  else if constexpr (ModelFactory<Model>)
    return made_in_place(std::move(model));
  else
    return model;
}

// Null where there is none, which a holder's own ptr() throws for.
template <typename Model>
std::shared_ptr<torch::nn::Module> module_of(const Model& model) {
  if constexpr (ModuleHolder<Model>)
    return model.is_empty() ? nullptr : model.ptr();
  else
    return model;
}

}  // namespace lockstep::internal

namespace lockstep {

// A model as a program has it, a module holder or a shared_ptr, for functions that take either.
class ModelRef {
 public:
  template <internal::SharedModel Model>
  ModelRef(const Model& model) : module_(internal::module_of(model)) {}

  // Null where there is none.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace lockstep

// The ways in which people hold a model: a module holder (TORCH_MODULE), a shared_ptr, or a module
// by value.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep::internal {

// The same model as something that can be shared: a module by value becomes a shared_ptr.
template <typename Model>
auto share_model(Model model) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Model>)
    return std::make_shared<Model>(std::move(model));
  else
    return model;
}

// Null where there is none, which a holder's own ptr() throws for.
template <typename Model>
std::shared_ptr<torch::nn::Module> module_of(const Model& model) {
  if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, Model>)
    return model.is_empty() ? nullptr : model.ptr();
  else
    return model;
}

}  // namespace lockstep::internal

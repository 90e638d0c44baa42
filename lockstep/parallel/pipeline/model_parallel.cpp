#include <lockstep/parallel/pipeline/model_parallel.h>

#include <map>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/split_model.h>

namespace lockstep::pipeline {

ModelParallelImpl::ModelParallelImpl(const torch::nn::Sequential& layers,
                                     std::vector<c10::Device> devices, Cuts cuts)
    : devices_(std::move(devices)), cuts_(std::move(cuts)) {
  const int num_devices = static_cast<int>(devices_.size());
  if (cuts_.empty()) cuts_ = partition(num_parameters_of(blocks_of(layers)), num_devices);
  check_cuts(cuts_, static_cast<int>(layers->size()), num_devices);
  for (std::size_t i = 0; i < devices_.size(); ++i)
    parts_.push_back(children_of(layers, cuts_[i], cuts_[i + 1]));
  check_shared();
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    parts_[i]->to(devices_[i]);
    for (const auto& child : parts_[i]->named_children())
      register_module(child.key(), child.value());
  }
}

void ModelParallelImpl::check_shared() const {
  std::map<const c10::TensorImpl*, std::size_t> places;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    for (const auto& item : parts_[i]->named_parameters()) {
      const auto [place, is_new] = places.emplace(item.value().unsafeGetTensorImpl(), i);
      if (devices_[place->second] != devices_[i])
        throw UsageError("'{}' on {} is also a parameter of a layer on {}: cut so that both are on "
                         "one device",
                         item.key(), devices_[i].str(), devices_[place->second].str());
    }
}

at::Tensor ModelParallelImpl::forward(at::Tensor x) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    // A copy to the CPU has to be complete before the CPU reads it.
    const bool on_stream = !devices_[i].is_cpu();
    x = parts_[i]->forward(x.to(devices_[i], /*non_blocking=*/on_stream));
  }
  return x;
}

}  // namespace lockstep::pipeline

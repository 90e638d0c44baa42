// How a tensor lies in its storage.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

namespace lockstep::activations {

struct View {
  explicit View(const at::Tensor& tensor);

  // The same of a storage that is laid out alike.
  at::Tensor of(const c10::intrusive_ptr<c10::StorageImpl>& storage) const;

  at::TensorOptions options;
  c10::DimVector sizes;
  c10::DimVector strides;
  std::int64_t offset;
};

c10::intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& tensor);

}  // namespace lockstep::activations

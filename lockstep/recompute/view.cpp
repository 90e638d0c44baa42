#include <lockstep/recompute/view.h>

#include <ATen/ATen.h>

namespace lockstep::activations {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

View::View(const at::Tensor& tensor)
    : options(tensor.options()),
      sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()) {}

at::Tensor View::of(const Storage& storage) const {
  return at::empty({0}, options).set_(c10::Storage(storage), offset, sizes, strides);
}

Storage storage_of(const at::Tensor& tensor) {
  return Storage::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace lockstep::activations

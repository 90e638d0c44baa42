#include <lockstep/recompute/saved_tensor.h>

#include <utility>

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/error.h>

namespace lockstep::activations {

bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  if (!tensor.is_view()) return tensor.is_leaf();
  // A custom function may return a view of memory that needs no gradient.
  return tensor._base().is_leaf() && tensor._base().requires_grad();
}

KeptTensor::KeptTensor(const at::Tensor& tensor)
    : tensor_(tensor.tensor_data()),  // shares the version of the original
      version_(tensor._version()) {}

const at::Tensor& KeptTensor::checked() const {
  if (changed())
    throw UsageError(
        "a tensor of shape {} was changed in place after an operator saved it for backward, which "
        "needs it as it was: change a copy, and step the optimizer after backward",
        c10::str(tensor_.sizes()));
  return tensor_;
}

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

namespace {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

// All bytes of the storage.
at::Tensor bytes_of(const at::Tensor& tensor) {
  View view(tensor);
  view.options = view.options.dtype(at::kByte);
  view.sizes = {static_cast<std::int64_t>(tensor.storage().nbytes())};
  view.strides = {1};
  view.offset = 0;
  return view.of(storage_of(tensor));
}

}  // namespace

HostCopy::HostCopy(const at::Tensor& tensor) : device_(tensor.device()) {
  const at::Tensor source = bytes_of(tensor);
  bytes_ = at::empty(source.sizes(),
                     at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda()));
  bytes_.copy_(source, /*non_blocking=*/true);
}

at::Tensor HostCopy::back(const View& view) {
  const std::lock_guard lock(mutex_);
  auto storage = returned_.lock();
  if (!storage) {
    storage =
        storage_of(at::empty(bytes_.sizes(), bytes_.options().device(device_).pinned_memory(false))
                       .copy_(bytes_, /*non_blocking=*/true));
    returned_ = WeakStorage(storage);
  }
  return view.of(storage);
}

std::shared_ptr<HostCopy> HostCopies::of(const at::Tensor& tensor) {
  const Storage storage = storage_of(tensor);
  if (const auto made = made_.find(storage.get());
      made != made_.end() && made->second.version == tensor._version())
    if (auto copy = made->second.copy.lock()) return copy;
  auto copy = std::make_shared<HostCopy>(tensor);
  made_.insert_or_assign(storage.get(), Made{c10::weak_intrusive_ptr<c10::StorageImpl>(storage),
                                             tensor._version(), copy});
  return copy;
}

}  // namespace lockstep::activations

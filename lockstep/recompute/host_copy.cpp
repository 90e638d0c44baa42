#include <lockstep/recompute/host_copy.h>

#include <utility>

#include <ATen/ATen.h>

namespace lockstep::activations {

namespace {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;

// All that the storage has, as bytes.
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

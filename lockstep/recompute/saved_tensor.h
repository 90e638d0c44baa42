// The forms in which a tensor that an operator saves for backward is kept: the tensor itself, its
// view of a storage, or a copy of the storage on the host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

namespace lockstep::activations {

// Whether the tensor is a parameter, or a view of one: that memory is in use anyway, so dropping
// the tensor saves nothing.
bool is_parameter(const at::Tensor& tensor);

// A saved tensor that is kept unchanged. Hooks have to find out themselves whether a saved tensor
// was changed in place, as autograd does without them.
class KeptTensor {
 public:
  KeptTensor() = default;
  // The tensor's node is left out: a node that saves its own result would keep itself alive.
  explicit KeptTensor(const at::Tensor& tensor);

  bool defined() const { return tensor_.defined(); }
  bool changed() const { return tensor_._version() != version_; }

  // UsageError if the tensor has been changed since.
  const at::Tensor& checked() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
};

// A tensor's sizes, strides and offset in its storage.
struct View {
  explicit View(const at::Tensor& tensor);

  // The same view of another storage with the same layout.
  at::Tensor of(const c10::intrusive_ptr<c10::StorageImpl>& storage) const;

  at::TensorOptions options;
  c10::DimVector sizes;
  c10::DimVector strides;
  std::int64_t offset;
};

c10::intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& tensor);

// A copy of all bytes of a storage in the host's memory. Copies to and from a GPU run on its
// current stream, with pinned memory, and the host does not wait for them.
//
// Ownership: owns the copy; tensors that back() returns belong to the caller. Threading: back() may
// be called from any thread.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& tensor);

  // Returns a tensor on the original device. Views share one storage again while any of them lives.
  at::Tensor back(const View& view);

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  c10::Device device_;
  at::Tensor bytes_;
  std::mutex mutex_;
  WeakStorage returned_{c10::intrusive_ptr<c10::StorageImpl>()};
};

// Makes copies, one for all tensors that share memory and were not written to in between.
// Threading: one thread at a time.
class HostCopies {
 public:
  std::shared_ptr<HostCopy> of(const at::Tensor& tensor);

 private:
  struct Made {
    // keeps the storage's address from being reused
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t version;
    std::weak_ptr<HostCopy> copy;
  };
  std::map<const c10::StorageImpl*, Made> made_;
};

}  // namespace lockstep::activations

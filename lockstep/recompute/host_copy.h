// The memory of tensors, copied to the host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <lockstep/recompute/view.h>

namespace lockstep::activations {

// All bytes of a storage. Copies to and from a GPU are made on the stream that is current there, to
// pinned memory, and the host does not wait for them.
//
// Ownership: owns the copy; what it gives back belongs to those who got it. Threading: back() may
// be called from any thread.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& tensor);

  // On the device that the bytes came from. Views share one storage again while any of them lives.
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
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other comes to its place
    std::int64_t version;
    std::weak_ptr<HostCopy> copy;
  };
  std::map<const c10::StorageImpl*, Made> made_;
};

}  // namespace lockstep::activations

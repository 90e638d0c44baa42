// Memory for what comes and goes with every unit, kept between uses.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace lockstep::shard {

// Fresh memory costs a page fault for every page of it: twenty times what a gather costs. So memory
// that is given back is handed out again, for requests that fit into it without much waste.
//
// Ownership: what is taken keeps the pool's record alive and comes back when it is dropped, also
// after the pool itself is gone; then it is freed. Threading: any.
class BufferPool {
 public:
  // Where new memory comes from: a tensor of so many bytes.
  using Allocate = std::function<at::Tensor(std::int64_t bytes)>;
  // Memory that waits to be taken again is freed where it and what is taken exceed the limit.
  BufferPool(Allocate allocate, std::int64_t limit_bytes);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  c10::DataPtr take(std::int64_t bytes);
  // The same as a flat tensor.
  at::Tensor take(std::int64_t elements, const at::TensorOptions& options);

  struct Usage {
    std::int64_t taken_bytes = 0;  // now
    std::int64_t held_bytes = 0;   // now, with what waits to be taken again
    std::int64_t peak_taken_bytes = 0;
    std::int64_t peak_held_bytes = 0;
  };
  Usage usage() const;
  void reset_peaks();

 private:
  struct Shared;

  Allocate allocate_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::shard

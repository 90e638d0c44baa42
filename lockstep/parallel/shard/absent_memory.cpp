#include <lockstep/parallel/shard/absent_memory.h>

#include <ATen/ATen.h>

namespace lockstep::shard {

at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options) {
  c10::Storage memory(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, options.device()),
                      /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, options).set_(std::move(memory));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace lockstep::shard

#include <lockstep/parallel/shard/absent_memory.h>

#include <ATen/ATen.h>

namespace lockstep::shard {

at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto num_bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) *
                         c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  c10::Storage memory(c10::Storage::use_byte_size_t(), num_bytes,
                      c10::DataPtr(nullptr, options.device()),
                      /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, options).set_(std::move(memory));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace lockstep::shard

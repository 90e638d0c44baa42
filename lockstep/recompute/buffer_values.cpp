#include <lockstep/recompute/buffer_values.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace lockstep::activations {

namespace {

constexpr std::size_t kSmallBytes = 64 << 10;

at::Tensor copy_of(const at::Tensor& buffer) { return buffer.detach().clone(); }

}  // namespace

BufferValues::BufferValues(const std::vector<at::Tensor>& buffers) {
  for (const at::Tensor& buffer : buffers)
    if (buffer.defined()) values_.push_back({buffer, copy_of(buffer)});
}

void BufferValues::drop_unchanged() {
  std::erase_if(values_, [](const Value& value) {
    return value.buffer.nbytes() > kSmallBytes && value.buffer.equal(value.copy);
  });
}

BufferValues BufferValues::now() const {
  BufferValues values;
  for (const Value& value : values_)
    values.values_.push_back({value.buffer, copy_of(value.buffer)});
  return values;
}

void BufferValues::restore() const {
  const at::AutoDispatchBelowADInplaceOrView unnoticed;
  for (const Value& value : values_) value.buffer.copy_(value.copy);
}

}  // namespace lockstep::activations

#include <lockstep/comm/staging.h>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::comm {

c10::Stream StagingStreams::on(c10::Device device) {
  const std::lock_guard lock(mutex_);
  for (const c10::Stream& stream : streams_)
    if (stream.device() == device) return stream;
  streams_.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  return streams_.back();
}

struct Staging::State {
  explicit State(c10::Stream side)
      : guard(side.device_type()),
        side(side),
        ready(side.device_type()),
        done(side.device_type()) {}

  c10::impl::VirtualGuardImpl guard;
  c10::Stream side;
  c10::Event ready;
  c10::Event done;
};

Staging::Staging(c10::Stream side) : state_(std::make_unique<State>(side)) {
  state_->ready.record(state_->guard.getStream(side.device()));
}

Staging::~Staging() = default;

at::Tensor Staging::host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options()
                                       .device(c10::DeviceType::CPU)
                                       .requires_grad(false)
                                       .pinned_memory(tensor.is_cuda()));
}

at::Tensor Staging::to_host(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const c10::StreamGuard stream(state_->side);
  state_->ready.block(state_->side);
  at::Tensor host = host_like(tensor);
  host.copy_(tensor);  // blocks until the bytes are here
  keep_for_side_stream(tensor);
  return host;
}

void Staging::to_device(const at::Tensor& from, const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const c10::StreamGuard stream(state_->side);
  // What the caller had enqueued on the tensor must not overtake the result.
  state_->ready.block(state_->side);
  tensor.copy_(from, /*non_blocking=*/true);
  keep_for_side_stream(tensor);
  if (!from.is_cpu()) keep_for_side_stream(from);
}

// The caller may let go of a tensor while the side stream still works on it: its memory must not be
// given to someone else before.
void Staging::keep_for_side_stream(const at::Tensor& tensor) {
  state_->guard.recordDataPtrOnStream(tensor.storage().data_ptr(), state_->side);
}

void Staging::finish() { state_->done.record(state_->side); }

void Staging::order_current_stream() {
  state_->done.block(state_->guard.getStream(state_->side.device()));
}

bool Staging::arrived() const { return state_->done.query(); }

}  // namespace lockstep::comm

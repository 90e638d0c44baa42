#include <lockstep/parallel/shard/buffer_pool.h>

#include <algorithm>
#include <mutex>

#include <ATen/ATen.h>

#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

struct BufferPool::Shared {
  struct NumBytes {
    std::int64_t operator()(const at::Tensor& buffer) const { return buffer.numel(); }
  };

  const std::int64_t limit_bytes;
  std::mutex mutex;
  IdleBuffers<at::Tensor, NumBytes> idle;
  Usage usage;
  bool closed = false;  // the pool is gone

  void make_room(std::int64_t bytes) {
    usage.held_bytes -= idle.free(usage.held_bytes + bytes - limit_bytes);
  }

  void take_back(at::Tensor buffer) {
    const std::lock_guard lock(mutex);
    usage.taken_bytes -= buffer.numel();
    if (closed) return;
    idle.add(std::move(buffer));
    make_room(0);
  }
};

namespace {

// A buffer that was taken, and the pool that it goes back to.
template <typename Home>
struct Taken {
  at::Tensor buffer;
  std::shared_ptr<Home> home;

  static void give_back(void* taken) {
    const std::unique_ptr<Taken> self(static_cast<Taken*>(taken));
    self->home->take_back(std::move(self->buffer));
  }
};

}  // namespace

BufferPool::BufferPool(Allocate allocate, std::int64_t limit_bytes)
    : allocate_(std::move(allocate)), shared_(new Shared{.limit_bytes = limit_bytes}) {}

BufferPool::~BufferPool() {
  const std::lock_guard lock(shared_->mutex);
  shared_->closed = true;
  shared_->idle = {};
}

c10::DataPtr BufferPool::take(std::int64_t bytes) {
  const std::lock_guard lock(shared_->mutex);
  Usage& usage = shared_->usage;
  at::Tensor buffer = shared_->idle.take(bytes).value_or(at::Tensor());
  if (!buffer.defined()) {
    shared_->make_room(bytes);
    buffer = allocate_(bytes);
    usage.held_bytes += buffer.numel();
  }
  usage.taken_bytes += buffer.numel();
  usage.peak_taken_bytes = std::max(usage.peak_taken_bytes, usage.taken_bytes);
  usage.peak_held_bytes = std::max(usage.peak_held_bytes, usage.held_bytes);
  void* const data = buffer.data_ptr();
  const c10::Device device = buffer.device();
  using Held = Taken<Shared>;
  return {data, new Held{std::move(buffer), shared_}, &Held::give_back, device};
}

at::Tensor BufferPool::take(std::int64_t elements, const at::TensorOptions& options) {
  const std::int64_t bytes = elements * static_cast<std::int64_t>(options.dtype().itemsize());
  c10::Storage memory(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes), take(bytes),
                      /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, options).set_(std::move(memory), 0, {elements}, {1});
}

BufferPool::Usage BufferPool::usage() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->usage;
}

void BufferPool::reset_peaks() {
  const std::lock_guard lock(shared_->mutex);
  shared_->usage.peak_taken_bytes = shared_->usage.taken_bytes;
  shared_->usage.peak_held_bytes = shared_->usage.held_bytes;
}

}  // namespace lockstep::shard

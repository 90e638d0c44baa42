#include <lockstep/nn/layers/random.h>

#include <bit>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/base/philox.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/nn/kernels/cpu/random_kernels.h>

namespace lockstep::nn {

namespace {

at::Tensor& write_normals(at::Tensor& tensor, std::int64_t seed, c10::string_view name, double std,
                          std::int64_t offset) {
  if (tensor.is_meta()) return tensor;  // only its shape is asked for
  const bool in_place =
      tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
  const auto values =
      in_place ? tensor : at::empty(tensor.sizes(), at::TensorOptions().dtype(at::kFloat));
  auto* out = values.data_ptr<float>();
  const auto key = stream_key(std::bit_cast<std::uint64_t>(seed), {name.data(), name.size()});
  device::parallel_pieces(values.numel(), 1 << 16, [&](std::int64_t begin, std::int64_t end) {
    normals_of_stream(key, static_cast<std::uint64_t>(offset + begin), end - begin, std,
                      out + begin);
  });
  if (!in_place) tensor.copy_(values);
  return tensor;
}

// Registered as an operator, so that a model that is built without memory defers it as it defers
// LibTorch's own.
TORCH_LIBRARY_FRAGMENT(lockstep, library) {
  library.def(
      "fill_normal_(Tensor(a!) self, int seed, str name, float std, int offset) -> Tensor(a!)",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &write_normals));
}

}  // namespace

std::uint64_t stream_key(std::uint64_t seed, std::string_view name, std::uint64_t step) {
  const auto words = Philox::words(seed, step, hash_text(name));
  return words[0] | static_cast<std::uint64_t>(words[1]) << 32;
}

void fill_normal(const at::Tensor& tensor, std::uint64_t seed, std::string_view name, double std,
                 std::int64_t offset) {
  if (!tensor.is_floating_point())
    throw UsageError("'{}' cannot be filled with normal random numbers: its type is {}", name,
                     c10::toString(tensor.scalar_type()));
  if (offset < 0) throw UsageError("'{}' has no element {}: offsets begin at 0", name, offset);
  static const auto fill = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("lockstep::fill_normal_", "")
                               .typed<decltype(write_normals)>();
  const c10::NoGradGuard no_grad;
  at::Tensor written = tensor;
  fill.call(written, std::bit_cast<std::int64_t>(seed), c10::string_view(name.data(), name.size()),
            std, offset);
}

}  // namespace lockstep::nn

#include <lockstep/nn/layers/autocast_operators.h>

#ifdef LOCKSTEP_HAVE_CUDA

#include <limits>
#include <numeric>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <lockstep/device/autocast.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/kernels/cuda/on_tensors.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kAutocast = c10::DispatchKey::AutocastCUDA;
// With fewer classes, a thread block for each row has too little to do.
constexpr std::int64_t kFewestClasses = 512;

// Redispatches to LibTorch's own operator, inside which autocast stays on.
c10::DispatchKeySet below_autocast(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAutocast);
}

bool has_forward_gradient(const at::Tensor& tensor) {
  return tensor._fw_grad(/*level=*/0).defined();
}

// ---- values += bias ----

class AddBias : public torch::autograd::Function<AddBias> {
 public:
  // Changes values [..., width] in place; the bias is [width].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& values,
                            const at::Tensor& bias) {
    context->mark_dirty({values});
    context->saved_data["dims"] = values.dim();
    const at::Tensor shifts = bias.contiguous();
    const std::int64_t width = bias.size(0);
    cuda::launch_on(values, [&](CUstream_st* stream) {
      cuda::add_bias({.values = values.data_ptr(),
                      .type = cuda::element_of(values.scalar_type()),
                      .rows = values.numel() / width,
                      .width = width},
                     shifts.data_ptr<float>(), stream);
    });
    return values;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(context->saved_data["dims"].toInt()) -
                                   1);
    std::iota(rows.begin(), rows.end(), 0);
    at::Tensor of_bias;
    if (context->needs_input_grad(1))
      of_bias = gradients[0].sum(rows, /*keepdim=*/false, at::kFloat);
    return {gradients[0], of_bias};
  }
};

bool takes_bias(const at::Tensor& values, const at::Tensor& bias, const at::Scalar& alpha) {
  // The bias may be a parameter that a strategy owns and that is in memory only while the owner
  // runs the operator.
  const bool is_elsewhere =
      intercept::is_tagged(bias) && !c10::impl::tls_is_dispatch_key_excluded(intercept::kKey);
  return values.is_cuda() && values.scalar_type() == device::Autocast::active(at::kCUDA) &&
         bias.scalar_type() == at::kFloat && bias.device() == values.device() && bias.dim() == 1 &&
         values.dim() >= 2 && values.size(-1) == bias.size(0) && cuda::bias_takes(bias.size(0)) &&
         values.is_contiguous() && !values.is_view() &&
         reinterpret_cast<std::uintptr_t>(values.data_ptr()) % 16 == 0 && !is_elsewhere &&
         !intercept::is_tagged(values) && alpha.equal(1) && !has_forward_gradient(values) &&
         !has_forward_gradient(bias);
}

at::Tensor& add_in_place(c10::DispatchKeySet keys, at::Tensor& values, const at::Tensor& bias,
                         const at::Scalar& alpha) {
  if (!takes_bias(values, bias, alpha))
    return at::_ops::add__Tensor::redispatch(below_autocast(keys), values, bias, alpha);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  AddBias::apply(values, bias);
  return values;
}

// ---- Cross-entropy of rows ----

// The kernel's gradient, written with operators that can be differentiated again.
at::Tensor differentiable_gradient(const at::Tensor& logits, const at::Tensor& targets,
                                   const at::Tensor& factors, std::int64_t ignore_index) {
  const at::Tensor ignored = targets.eq(ignore_index);
  const at::Tensor columns = targets.masked_fill(ignored, 0).unsqueeze(1);
  const at::Tensor shares = logits.softmax(1, at::kFloat);
  const at::Tensor slopes = shares.scatter_add(1, columns, at::full_like(columns, -1, at::kFloat));
  return (slopes * factors.masked_fill(ignored, 0).unsqueeze(1)).to(logits.scalar_type());
}

cuda::LogitBlock block_of(const at::Tensor& logits, const at::Tensor& targets,
                          std::int64_t ignore_index) {
  return {.logits = logits.data_ptr(),
          .type = cuda::element_of(logits.scalar_type()),
          .targets = targets.data_ptr<std::int64_t>(),
          .rows = logits.size(0),
          .vocabulary = logits.size(1),
          .ignore_index = ignore_index};
}

// The arrays [rows] of a kernel call: losses, largest logits and 1 / sums of exponentials.
cuda::RowLosses rows_of(const at::Tensor& losses, const at::Tensor& statistics) {
  float* const numbers = statistics.data_ptr<float>();
  return {.losses = losses.defined() ? losses.data_ptr<float>() : nullptr,
          .largest = numbers,
          .inverse = numbers + statistics.size(1)};
}

class CrossEntropyOfRows : public torch::autograd::Function<CrossEntropyOfRows> {
 public:
  // logits [rows, classes] and targets [rows] give losses [rows] in float, 0 where a target is
  // ignored.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, std::int64_t ignore_index) {
    const at::Tensor packed = cuda::dense(logits), indices = targets.contiguous();
    const auto floats = logits.options().dtype(at::kFloat);
    at::Tensor losses = at::empty({logits.size(0)}, floats);
    const at::Tensor statistics = at::empty({2, logits.size(0)}, floats);
    cuda::launch_on(logits, [&](CUstream_st* stream) {
      cuda::cross_entropy_forward(block_of(packed, indices, ignore_index),
                                  rows_of(losses, statistics), stream);
    });
    context->save_for_backward({logits, targets, statistics});
    context->saved_data["ignore_index"] = ignore_index;
    return losses;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1];
    const auto ignore_index = context->saved_data["ignore_index"].toInt();
    if (at::GradMode::is_enabled())
      return {differentiable_gradient(logits, targets, gradients[0], ignore_index), {}, {}};
    const at::Tensor packed = cuda::dense(logits), indices = targets.contiguous();
    const at::Tensor factors = gradients[0].contiguous();
    const at::Tensor result = at::empty_like(packed);
    cuda::launch_on(logits, [&](CUstream_st* stream) {
      cuda::cross_entropy_backward(block_of(packed, indices, ignore_index), rows_of({}, saved[2]),
                                   factors.data_ptr<float>(), result.data_ptr(), stream);
    });
    return {result, {}, {}};
  }
};

bool takes_logits(const at::Tensor& logits, const at::Tensor& targets) {
  return cuda::takes(logits) && logits.dim() == 2 && logits.size(1) >= kFewestClasses &&
         logits.size(0) > 0 && logits.size(0) <= std::numeric_limits<std::int32_t>::max() &&
         targets.scalar_type() == at::kLong && targets.dim() == 1 &&
         targets.size(0) == logits.size(0) && targets.device() == logits.device() &&
         // Backward would read memory that a tagged tensor's owner may have freed by then.
         !intercept::is_tagged(logits) && !intercept::is_tagged(targets) &&
         !has_forward_gradient(logits);
}

at::Tensor cross_entropy_loss(c10::DispatchKeySet keys, const at::Tensor& logits,
                              const at::Tensor& targets,
                              const c10::optional<at::Tensor>& class_weights,
                              std::int64_t reduction, std::int64_t ignore_index,
                              double label_smoothing) {
  const bool weighted = class_weights && class_weights->defined();
  const bool known = reduction == at::Reduction::None || reduction == at::Reduction::Mean ||
                     reduction == at::Reduction::Sum;
  if (weighted || !known || label_smoothing != 0 || !takes_logits(logits, targets))
    return at::_ops::cross_entropy_loss::redispatch(below_autocast(keys), logits, targets,
                                                    class_weights, reduction, ignore_index,
                                                    label_smoothing);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const at::Tensor losses = CrossEntropyOfRows::apply(logits, targets, ignore_index);
  if (reduction == at::Reduction::None) return losses;
  const at::Tensor sum = losses.sum();
  return reduction == at::Reduction::Sum ? sum : sum / targets.ne(ignore_index).sum();
}

bool has_function(const char* name, const char* overload) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, overload)
      .hasKernelForDispatchKey(kAutocast);
}

bool register_both() {
  // Never unregistered, because threads may compute until the process ends.
  auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", kAutocast, __FILE__, __LINE__);
  if (!has_function("aten::add_", "Tensor")) library->impl("add_.Tensor", TORCH_FN(add_in_place));
  if (!has_function("aten::cross_entropy_loss", ""))
    library->impl("cross_entropy_loss", TORCH_FN(cross_entropy_loss));
  return true;
}

}  // namespace

void register_autocast_operators() {
  [[maybe_unused]] static const bool registered = register_both();
}

}  // namespace lockstep::nn

#else

namespace lockstep::nn {

void register_autocast_operators() {}

}  // namespace lockstep::nn

#endif

#include <lockstep/device/probe.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <string_view>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/device/cuda.h>

namespace lockstep::device {

namespace {

#define LOCKSTEP_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

using Product = std::function<at::Tensor()>;

// Big enough to be bound by arithmetic, small enough to take about a millisecond.
std::int64_t matrix_size(c10::Device device) {
  return device.is_cpu() ? 256 : 2048;
}

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

// Values in [-1, 1] that need no random generator.
at::Tensor matrix(c10::Device device, double step) {
  const std::int64_t n = matrix_size(device);
  const auto values = at::arange(n * n, at::TensorOptions().dtype(at::kFloat).device(device));
  return values.mul(step).sin().reshape({n, n});
}

// Reading one element back waits for the device, whichever it is.
double run_seconds(const Product& product) {
  const auto from = Clock::now();
  product().select(0, 0).select(0, 0).to(at::kFloat).item<float>();
  return std::chrono::duration<double>(Clock::now() - from).count();
}

struct Times {
  double fp32 = std::numeric_limits<double>::max();
  double other = std::numeric_limits<double>::max();
};

// The best of several turns of each, alternating, so that a busy neighbour hits both alike.
Times measure(const Product& fp32, const Product& other) {
  constexpr int kTurns = 7;
  constexpr double kPatience = 0.2;  // seconds in all; a format that crawls need not crawl 7 times
  run_seconds(fp32);
  run_seconds(other);
  Times times;
  const auto from = Clock::now();
  for (int turn = 0; turn < kTurns; ++turn) {
    times.fp32 = std::min(times.fp32, run_seconds(fp32));
    times.other = std::min(times.other, run_seconds(other));
    if (std::chrono::duration<double>(Clock::now() - from).count() > kPatience) break;
  }
  return times;
}

Support judge(const char* format, c10::Device device, const Product& fp32, const Product& other,
              double tolerance) {
  const at::Tensor expected = fp32();
  const at::Tensor found = other().to(at::kFloat);
  const double error = (found - expected).norm().item<double>() / expected.norm().item<double>();
  if (!(error <= tolerance))
    return {false, fmt::format("a product of {} matrices on {} is wrong: relative error {:.2g}",
                               format, device.str(), error)};
  const Times times = measure(fp32, other);
  const auto n = static_cast<double>(matrix_size(device));
  const double giga = 2 * n * n * n * 1e-9;
  const std::string figures =
      fmt::format("a product of {0}x{0} matrices: {1:.1f} GFLOP/s in {2}, {3:.1f} in fp32",
                  matrix_size(device), giga / times.other, format, giga / times.fp32);
  constexpr double kSlowest = 2;
  if (times.other > kSlowest * times.fp32)
    return {false, fmt::format("{} is more than {} times slower than fp32 on {} ({})", format,
                               kSlowest, device.str(), figures)};
  return {true, figures};
}

// Probes must see plain kernels and leave no trace: no autograd, no autocast.
Support guarded(const char* format, c10::Device device, const std::function<Support()>& probe) {
  try {
    const c10::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return probe();
  } catch (const std::exception& error) {
    return {false, fmt::format("a product of {} matrices on {} fails: {}", format, device.str(),
                               first_line(error.what()))};
  }
}

#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
Support try_fp8(c10::Device device) {
  const at::Tensor a = matrix(device, 0.37).to(at::kFloat8_e4m3fn);
  const at::Tensor b = matrix(device, 0.73).to(at::kFloat8_e4m3fn);
  const at::Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(device));
  const at::Tensor plain_a = a.to(at::kFloat);
  const at::Tensor plain_b = b.to(at::kFloat).t();
  return judge(
      "fp8", device, [&] { return at::mm(plain_a, plain_b); },
      [&] { return at::_scaled_mm(a, b.t(), one, one, {}, {}, at::kBFloat16); }, 0.02);
}
#endif

}  // namespace

Support probe_bf16(c10::Device device) {
  return guarded("bf16", device, [&] {
    const at::Tensor a = matrix(device, 0.37).to(at::kBFloat16);
    const at::Tensor b = matrix(device, 0.73).to(at::kBFloat16);
    const at::Tensor plain_a = a.to(at::kFloat);
    const at::Tensor plain_b = b.to(at::kFloat);
    return judge(
        "bf16", device, [&] { return at::mm(plain_a, plain_b); }, [&] { return at::mm(a, b); },
        0.02);
  });
}

Support probe_fp8(c10::Device device) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
  if (device.is_cuda()) {
    const auto [major, minor] = gpu_capability(device.index());
    if (major * 10 + minor < 89)
      return {false, fmt::format("{} has compute capability {}.{}; fp8 needs 8.9 or later",
                                 device.str(), major, minor)};
  }
  return guarded("fp8", device, [&] { return try_fp8(device); });
#else
  return {false,
          fmt::format("LibTorch {}.{} has no product of fp8 matrices on {}; 2.5 and later do",
                      TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, device.str())};
#endif
}

}  // namespace lockstep::device

#include <lockstep/device/probe.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
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
std::int64_t matrix_size(c10::Device device) { return device.is_cpu() ? 256 : 2048; }

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

// Values in [-1, 1] that need no random generator.
at::Tensor matrix(c10::Device device, std::int64_t n, double step) {
  const auto values = at::arange(n * n, at::TensorOptions().dtype(at::kFloat).device(device));
  return values.mul(step).sin().reshape({n, n});
}

// The same product of n × n matrices in both formats.
struct Products {
  Product fp32;
  Product other;
};
using Maker = std::function<Products(std::int64_t n)>;

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

constexpr double kSlowest = 2;  // times fp32's time

// The best of several turns of each, alternating, so that a busy neighbour hits both alike. Where
// the format looks too slow it gets more turns: on a busy machine most of them tell of the load.
Times measure(const Products& products) {
  constexpr int kTurns = 5;
  constexpr double kPatience = 0.3;  // seconds
  run_seconds(products.fp32);
  run_seconds(products.other);
  Times times;
  const auto from = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - from).count(); };
  for (int turn = 0; turn < kTurns || times.other > kSlowest * times.fp32; ++turn) {
    times.fp32 = std::min(times.fp32, run_seconds(products.fp32));
    times.other = std::min(times.other, run_seconds(products.other));
    if (elapsed() > kPatience) break;
  }
  return times;
}

double relative_error(const Products& products) {
  const at::Tensor expected = products.fp32();
  const at::Tensor found = products.other().to(at::kFloat);
  return (found - expected).norm().item<double>() / expected.norm().item<double>();
}

Support judge(const char* format, c10::Device device, const Maker& make) {
  constexpr double kTolerance = 0.02;
  constexpr double kLongest = 0.1;  // seconds for one product
  const auto verdict = [&](std::int64_t n, const Times& times) -> Support {
    const double giga = 2e-9 * static_cast<double>(n * n * n);
    const std::string figures =
        fmt::format("a product of {0}x{0} matrices: {1:.2f} GFLOP/s in {2}, {3:.2f} in fp32", n,
                    giga / times.other, format, giga / times.fp32);
    if (times.other > kSlowest * times.fp32)
      return {false, fmt::format("{} is more than {} times slower than fp32 on {} ({})", format,
                                 kSlowest, device.str(), figures)};
    return {true, figures};
  };

  // A quarter of the size first: a format that crawls would take seconds with the whole.
  const std::int64_t n = matrix_size(device);
  const Products small = make(n / 4);
  if (const double error = relative_error(small); !(error <= kTolerance))
    return {false, fmt::format("a product of {} matrices on {} is wrong: relative error {:.2g}",
                               format, device.str(), error)};
  const Times small_times = measure(small);
  if (Support answer = verdict(n / 4, small_times);
      !answer.yes && small_times.other * 64 > kLongest)
    return answer;
  return verdict(n, measure(make(n)));
}

// One thread, while it lives: on a busy machine threads that wait for each other would be measured
// instead of the arithmetic. Only OpenMP's pool can be changed and changed back.
class OneThread {
 public:
  OneThread() {
    if (at::get_parallel_info().find("parallel backend: OpenMP") == std::string::npos) return;
    before_ = at::get_num_threads();
    at::set_num_threads(1);
  }
  ~OneThread() {
    if (before_ > 0) at::set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = 0;
};

// Probes must see plain kernels and leave no trace: no autograd, no autocast.
Support guarded(const char* format, c10::Device device, const std::function<Support()>& probe) {
  try {
    const c10::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<OneThread> one_thread;
    if (device.is_cpu()) one_thread.emplace();
    return probe();
  } catch (const std::exception& error) {
    return {false, fmt::format("a product of {} matrices on {} fails: {}", format, device.str(),
                               first_line(error.what()))};
  }
}

}  // namespace

Support probe_bf16(c10::Device device) {
  return guarded("bf16", device, [&] {
    return judge("bf16", device, [&](std::int64_t n) -> Products {
      const at::Tensor a = matrix(device, n, 0.37).to(at::kBFloat16);
      const at::Tensor b = matrix(device, n, 0.73).to(at::kBFloat16);
      return {[a = a.to(at::kFloat), b = b.to(at::kFloat)] { return at::mm(a, b); },
              [a, b] { return at::mm(a, b); }};
    });
  });
}

Support probe_fp8(c10::Device device) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
  return guarded("fp8", device, [&]() -> Support {
    if (device.is_cuda()) {
      const auto [major, minor] = gpu_capability(device.index());
      if (major * 10 + minor < 89)
        return {false, fmt::format("{} has compute capability {}.{}; fp8 needs 8.9 or later",
                                   device.str(), major, minor)};
    }
    return judge("fp8", device, [&](std::int64_t n) -> Products {
      const at::Tensor a = matrix(device, n, 0.37).to(at::kFloat8_e4m3fn);
      // The second factor has to be column-major.
      const at::Tensor b = matrix(device, n, 0.73).to(at::kFloat8_e4m3fn).t();
      const at::Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(device));
      return {[a = a.to(at::kFloat), b = b.to(at::kFloat)] { return at::mm(a, b); },
              [a, b, one] { return at::_scaled_mm(a, b, one, one, {}, {}, at::kBFloat16); }};
    });
  });
#else
  return {false,
          fmt::format("LibTorch {}.{} has no product of fp8 matrices on {}; 2.5 and later do",
                      TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, device.str())};
#endif
}

}  // namespace lockstep::device

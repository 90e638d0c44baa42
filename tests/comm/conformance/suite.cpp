#include "suite.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm::conformance {

void Suite::cell(const std::string& name, const std::function<void()>& body) {
  current_ = name;
  ++num_cells_;
  body();
}

std::vector<Algorithm> Suite::algorithms(Operation operation) const {
  std::vector<Algorithm> all = {Algorithm::automatic};
  if (!group_.canonical_order()) return all;
  for (const Algorithm algorithm : algorithms_of(operation)) all.push_back(algorithm);
  return all;
}

void Suite::expect(bool good, const std::string& otherwise) {
  if (good) return;
  // A broken backend fails thousands of cells; the first failures are enough.
  if (++num_failures_ <= 20) std::printf("FAIL [%s] %s\n", current_.c_str(), otherwise.c_str());
}

void Suite::expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  const at::Tensor host = got.to(at::kCPU).contiguous();
  if (host.scalar_type() != wanted.scalar_type() || host.numel() != wanted.numel())
    return expect(false,
                  fmt::format("{}: {} elements, wanted {}", what, host.numel(), wanted.numel()));
  const std::size_t size = host.element_size();
  const auto* a = static_cast<const char*>(host.data_ptr());
  const auto* b = static_cast<const char*>(wanted.data_ptr());
  const auto count = static_cast<std::size_t>(host.numel());
  if (count == 0 || std::memcmp(a, b, count * size) == 0) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::memcmp(a + i * size, b + i * size, size) == 0) continue;
    const auto at = static_cast<std::int64_t>(i);
    const double mine = host.view({-1})[at].item<double>();
    const double theirs = wanted.view({-1})[at].item<double>();
    if (std::isnan(mine) && std::isnan(theirs)) continue;
    return expect(
        false, fmt::format("{}: element {} of {} is {}, wanted {}", what, i, count, mine, theirs));
  }
}

void Suite::expect_text(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos,
         fmt::format("the error should mention '{}', but says: {}", part, text));
}

at::Tensor Suite::place(const at::Tensor& host) const {
  return device_.is_cpu() ? host.clone() : host.to(device_);
}

at::Tensor Suite::room(std::int64_t count, at::ScalarType dtype) const {
  return at::ones({count}, at::TensorOptions().dtype(dtype).device(device_));
}

}  // namespace lockstep::comm::conformance

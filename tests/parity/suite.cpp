#include "suite.h"

#include <cstdio>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

namespace lockstep::parity {

void Suite::cell(const std::string& name, const std::function<void()>& body) {
  current_ = name;
  ++num_cells_;
  body();
}

void Suite::expect(bool good, const std::string& otherwise) {
  if (good) return;
  ++num_failures_;
  std::printf("FAIL [%s] %s\n", current_.c_str(), otherwise.c_str());
}

void Suite::expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  if (!got.defined() || !wanted.defined())
    return expect(got.defined() == wanted.defined(),
                  fmt::format("{} is {}defined, one process's is {}defined", what,
                              got.defined() ? "" : "un", wanted.defined() ? "" : "un"));
  if (at::equal(got, wanted)) return;
  const double worst = (got - wanted).abs().max().item<double>();
  expect(false, fmt::format("{} differs from one process's by up to {}", what, worst));
}

void Suite::expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  if (!got.defined() || !wanted.defined()) return expect_same(got, wanted, what);
  if (at::allclose(got, wanted, 1e-4, 1e-5)) return;
  const double worst = (got - wanted).abs().max().item<double>();
  expect(false, fmt::format("{} differs from the whole batch's by up to {}", what, worst));
}

}  // namespace lockstep::parity

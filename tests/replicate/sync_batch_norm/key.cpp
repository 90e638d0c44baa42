#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>

#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include "ranks.h"

namespace lockstep::replicate {

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

}  // namespace

void check_key(ranks::Cells& cells) {
  torch::nn::BatchNorm1d norm(2);
  const auto convert = [&] { return SyncBatchNorm(*norm, *cells.group()).num_converted(); };
  cells.cell("by a fallback", [&] {
    torch::Library other(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    other.fallback(torch::CppFunction::makeFallthrough());
    cells.expect_usage_error(convert, "another library of this process has functions of its own "
                                      "for all operators under LibTorch's dispatch key "
                                      "TESTING_ONLY_GenericWrapper");
  });
  cells.cell("by one operator", [&] {
    torch::Library other(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    other.impl("relu", twice);
    cells.expect_usage_error(convert, "for aten::relu under");
  });
  cells.cell("free again", [&] {
    cells.expect(convert() == 1, "nothing was converted");
    cells.expect(convert() == 1, "nothing was converted the second time");
  });
}

}  // namespace lockstep::replicate

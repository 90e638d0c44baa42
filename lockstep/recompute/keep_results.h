// Chooses by kind of operation what recomputation keeps: results that are expensive to compute.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/intercept/mode.h>

namespace lockstep {

enum class OperationKind : std::uint8_t {
  matrix_product,  // linear, matmul, mm, bmm, addmm, baddbmm
  convolution,
  attention,
};

namespace activations {

using OperationKinds = std::set<OperationKind>;

// Handles the operations whose results a recomputed function keeps, in its first or second run.
class ResultKeeper {
 public:
  virtual ~ResultKeeper() = default;
  virtual bool keeps(OperationKind kind) const = 0;
  // Returns the operation's result: by calling it, or from the first run.
  virtual at::Tensor result(OperationKind kind, const std::vector<at::Tensor>& arguments,
                            const std::function<at::Tensor()>& operation) = 0;
};

// While it lives, operations on this thread go to the keeper, or to none if it is null. UsageError
// if another library uses the dispatch key that this needs, which is state of the whole process.
class KeeperScope {
 public:
  explicit KeeperScope(ResultKeeper* keeper);
  ~KeeperScope();
  KeeperScope(const KeeperScope&) = delete;
  KeeperScope& operator=(const KeeperScope&) = delete;

 private:
  ResultKeeper* outer_;
  std::optional<intercept::ModeScope> mode_;
};

ResultKeeper* current_keeper();

// The kinds of results that functions recomputed from now on keep.
const OperationKinds& kept_kinds();

// Calls fn(arguments…), which returns one tensor, as an operation of this kind. This is for
// operations that are no operators of LibTorch, such as our own kernels.
template <typename Fn, typename... Arguments>
at::Tensor operation(OperationKind kind, const Fn& fn, const Arguments&... arguments) {
  ResultKeeper* const keeper = current_keeper();
  if (keeper == nullptr || !keeper->keeps(kind)) return fn(arguments...);
  return keeper->result(kind, {arguments...}, [&] {
    const KeeperScope none(nullptr);
    return fn(arguments...);
  });
}

}  // namespace activations

// While it lives, a function that is recomputed on this thread (by recompute(), in a BlockList or a
// Sequential) keeps the results of these kinds of operations, and its second run uses them instead
// of computing them: only cheap operations run again.
//
//   const lockstep::KeepResults keep({OperationKind::matrix_product, OperationKind::attention});
//   auto loss = model->forward(batch);
//
// The inputs of such operations are still recomputed, except the 16-bit copies that autocast makes
// of them, which are kept. The bits are those of a plain run. Threading: belongs to the thread on
// which it was made. Failure: backward() throws UsageError if a result was changed in place, or if
// the function itself goes backward through one.
class KeepResults {
 public:
  explicit KeepResults(activations::OperationKinds kinds);
  ~KeepResults();
  KeepResults(const KeepResults&) = delete;
  KeepResults& operator=(const KeepResults&) = delete;

 private:
  activations::OperationKinds outer_;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::KeepResults;

}  // namespace lockstep::names

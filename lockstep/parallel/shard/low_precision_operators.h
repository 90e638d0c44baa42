// Operators on parameters of 16 bits, given inputs of 32.
#pragma once

#include <c10/core/ScalarType.h>

#include <lockstep/intercept/owner.h>

namespace lockstep::shard {

// A model that was written for Float hands Float to its first layer, whose weights are now of 16
// bits. Such an operator runs under LibTorch's autocast, which casts its inputs where that is safe,
// and in a way that backward follows; all others run as they are.
//
// Threading: as LibTorch's operators.
class LowPrecisionOperators final : public intercept::Owner {
 public:
  explicit LowPrecisionOperators(c10::ScalarType type) : type_(type) {}

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  bool only_listens() const override { return true; }

 private:
  c10::ScalarType type_;
};

}  // namespace lockstep::shard

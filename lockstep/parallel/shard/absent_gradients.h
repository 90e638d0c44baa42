// Stand-ins for gradients: .grad() of a parameter has one while the gradient itself lies in parts
// on the ranks.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <lockstep/intercept/owner.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::shard {

// A tensor of the parameter's shape without memory. It says that there is a gradient: dropping it
// from .grad() drops the gradient, zeroing it zeroes it. Any other operator on it, as an optimizer
// over model->parameters() would call, throws a UsageError that says what to do instead.
//
// Threading: as LibTorch's operators.
class AbsentGradients final : public intercept::Owner,
                              public std::enable_shared_from_this<AbsentGradients> {
 public:
  static std::shared_ptr<AbsentGradients> make(const std::vector<NamedTensor>& parameters);

  void put(std::size_t index, const at::Tensor& parameter) const;
  bool is_in(std::size_t index, const at::Tensor& parameter) const;

  // Whether it was zeroed since put() or the last time this was asked to forget.
  bool was_zeroed(std::size_t index) const { return entries_[index].zeroed; }
  void forget_zeroing(std::size_t index) { entries_[index].zeroed = false; }

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;

 private:
  struct Entry {
    std::string name;
    at::Tensor stand_in;
    bool zeroed = false;
  };

  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> by_memory_;
};

}  // namespace lockstep::shard

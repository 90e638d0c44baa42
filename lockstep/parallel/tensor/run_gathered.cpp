#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>
#include <lockstep/parallel/tensor/gathered_view.h>
#include <lockstep/parallel/tensor/split_operators.h>

namespace lockstep::tensor {

namespace {

// The whole tensors of one call, and what they are of.
class GatheredArguments {
 public:
  GatheredArguments(intercept::Call& call, SplitOwner& owner) : call_(call), owner_(owner) {}

  void put() {
    const auto arguments = arguments_of(call_);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = call_.op().schema().arguments()[i].alias_info();
      const bool written = alias != nullptr && alias->isWrite();
      c10::IValue& argument = arguments[i];
      if (argument.isTensor()) {
        if (split_argument(argument, owner_) != nullptr)
          argument = gather(argument.toTensor(), written);
      } else if (argument.isTensorList()) {
        std::vector<at::Tensor> list = argument.toTensorVector();
        for (at::Tensor& tensor : list)
          if (split_argument(tensor, owner_) != nullptr) tensor = gather(tensor, written);
        argument = std::move(list);
      } else if (argument.isList()) {
        auto list = argument.toList().copy();
        for (std::size_t k = 0; k < list.size(); ++k)
          if (const c10::IValue element = list.get(k); split_argument(element, owner_) != nullptr)
            list.set(k, gather(element.toTensor(), written));
        argument = std::move(list);
      }
    }
  }

  // Parts that were written to get what the operator wrote.
  void write_back() {
    for (const One& one : all_) {
      if (!one.written) continue;
      const std::int64_t dim = split_of(one.tensor)->dim;
      if (one.whole.sizes() != one.tensor.sizes())
        throw UsageError("{} changes the sizes of a tensor that is cut over ranks, which comes "
                         "from '{}': call it on what full_tensor() returns",
                         name(), *split_of(one.tensor)->source);
      part_to_write(one.tensor).copy_(nn::take_part(one.whole, dim, owner_.axis()));
      was_written(one.tensor);
    }
  }

  // The tensors in place of whole ones that were written to; views of whole ones, guarded.
  void check_results() {
    const std::size_t count = call_.op().schema().returns().size();
    for (c10::IValue& result : std::span(call_.stack()).last(count)) {
      if (result.isTensor()) {
        result = checked(result.toTensor());
      } else if (result.isTensorList()) {
        std::vector<at::Tensor> list = result.toTensorVector();
        for (at::Tensor& tensor : list) tensor = checked(tensor);
        result = std::move(list);
      }
    }
  }

 private:
  struct One {
    at::Tensor tensor, whole;
    bool written;
  };

  const std::string& name() const { return call_.op().operator_name().name; }

  at::Tensor gather(const at::Tensor& tensor, bool written) {
    if (written) part_to_write(tensor);  // or it may not be
    all_.push_back({tensor, owner_.gathered(tensor, name()), written});
    return all_.back().whole;
  }

  at::Tensor checked(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const One& one : all_) {
      if (one.written && one.whole.is_same(result)) return one.tensor;
      if (result.has_storage() && result.is_alias_of(one.whole))
        guard_view(result, split_of(one.tensor)->part, name());
    }
    return result;
  }

  intercept::Call& call_;
  SplitOwner& owner_;
  std::vector<One> all_;
};

}  // namespace

void run_gathered(intercept::Call& call, SplitOwner& owner) {
  GatheredArguments gathered(call, owner);
  gathered.put();
  call.proceed();
  gathered.write_back();
  gathered.check_results();
}

}  // namespace lockstep::tensor

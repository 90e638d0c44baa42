// An operator that was called on deferred tensors and has yet to run, with all that it needs to do
// so later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <lockstep/deferred/memory.h>

namespace lockstep::deferred {

// A tensor in a memory.
struct Region {
  explicit Region(const at::Tensor& tensor);

  // The tensor, in a storage that stands for the memory; plain, with no history.
  at::Tensor on(const c10::Storage& storage) const;
  std::shared_ptr<Memory> memory;
  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset;  // in elements
  bool covers_memory;   // has all bytes of it, each once
};

enum class Access : std::uint8_t {
  read,
  modify,
  overwrite,  // all of the memory, without reading it
};

// An argument, or an element of an argument that is a list.
struct DeferredArgument {
  Region region;
  Access access = Access::read;
  std::size_t argument = 0;
  std::optional<std::size_t> element;
};

// The generator that a random operator drew from, as it was then.
struct GeneratorState {
  std::size_t argument = 0;
  at::Tensor bytes;
};

struct Record {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // what stands in place of deferred tensors means nothing
  std::vector<DeferredArgument> deferred;
  std::vector<Region> results;  // where what it returns is to lie, unless it returns arguments
  std::optional<GeneratorState> generator;

  // Everything it reads or changes without overwriting it; what it writes to.
  std::vector<Memory*> inputs() const;
  std::vector<Memory*> outputs() const;
};

// Nothing where a tensor among the arguments is of a kind that cannot be kept until later. Tensors
// that are not deferred are copied, as they may change.
std::optional<Record> capture(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments,
                              const Account* account);

// Calls visit(tensor, element) for the defined tensors of an argument; `element` is nothing where
// the argument is no list.
template <typename Visit>
void for_each_tensor(const c10::IValue& argument, Visit&& visit) {
  if (argument.isTensor()) {
    if (argument.toTensor().defined()) visit(argument.toTensor(), std::optional<std::size_t>());
  } else if (argument.isList()) {
    const auto elements = argument.toListRef();
    for (std::size_t i = 0; i < elements.size(); ++i)
      if (elements[i].isTensor() && elements[i].toTensor().defined())
        visit(elements[i].toTensor(), std::optional<std::size_t>(i));
  }
}

// Puts a tensor where for_each_tensor() found one.
void set_tensor(c10::IValue& argument, std::optional<std::size_t> element, at::Tensor tensor);
// A copy whose lists are its own.
c10::IValue with_own_lists(const c10::IValue& argument);

}  // namespace lockstep::deferred

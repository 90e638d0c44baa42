// Operators that were called on deferred tensors. Each is recorded with everything that it needs to
// run later, in a log in the order of the calls, and runs when a tensor's values are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <lockstep/deferred/memory.h>

namespace lockstep::deferred {

// A tensor's sizes, strides and place in a memory.
struct Region {
  explicit Region(const at::Tensor& tensor);

  // The same tensor in another storage, without autograd's history.
  at::Tensor on(const c10::Storage& storage) const;
  std::shared_ptr<Memory> memory;
  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset;  // in elements
  bool covers_memory;   // it has each byte of the memory once
};

enum class Access : std::uint8_t {
  read,
  modify,
  overwrite,  // writes all of the memory without reading it
};

// An argument, or an element of an argument that is a list.
struct DeferredArgument {
  Region region;
  Access access = Access::read;
  std::size_t argument = 0;
  std::optional<std::size_t> element;
};

// The state that a random operator's generator had before it drew.
struct GeneratorState {
  std::size_t argument = 0;
  at::Tensor bytes;
};

struct Record {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // undefined in place of deferred tensors
  std::vector<DeferredArgument> deferred;
  std::vector<Region> results;  // places of its results, unless it returns arguments
  std::optional<GeneratorState> generator;

  // The memories that it reads or modifies, and those that it writes to.
  std::vector<Memory*> inputs() const;
  std::vector<Memory*> outputs() const;
};

// Returns nothing if a tensor among the arguments cannot be kept until later. Tensors that are not
// deferred are copied, because they may change.
std::optional<Record> capture(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments,
                              const Account* account);

// Calls visit(tensor, element) for the defined tensors of an argument; `element` is empty if the
// argument is not a list.
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
// A copy that does not share its lists.
c10::IValue with_own_lists(const c10::IValue& argument);

// The operators that were deferred, in the order in which they were called. Threading: one thread
// at a time; it also changes `writers` and `blank` of the memories in its records.
class Log {
 public:
  using Numbers = std::set<std::size_t>;

  void append(Record record);
  const Record& at(std::size_t number) const { return records_.at(number); }

  // The records that have to run, in order, to give these memories the content that they should
  // have by now. A memory that holds its content needs none.
  Numbers needed_for(std::span<const Memory* const> memories) const;

  // Drops records that none of these memories needs, even if it were computed from the start.
  void forget_all_but(std::span<const Memory* const> memories);

 private:
  enum class Held { is_there, is_made_again };
  Numbers needed_for(std::span<const Memory* const> memories, Held held) const;

  std::map<std::size_t, Record> records_;
  std::size_t next_ = 0;
};

// Whether the memory holds the content that the record of this number reads there.
bool has_content_for(const Memory& memory, std::size_t number);

// Computes the content of memories that hold nothing yet and whose storages live, by running the
// operators in the log. Intermediate results lie elsewhere and are freed as soon as nothing needs
// them; generators and other memories do not change.
//
// Failure: an operator's exception. The content of the memories is then undefined.
void replay(const Log& log, std::span<const Memory* const> memories, Account& account);

}  // namespace lockstep::deferred

#include <lockstep/deferred/record.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/factory_scope.h>
#include <lockstep/deferred/operator_traits.h>
#include <lockstep/deferred/random_draws.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

namespace {

// Newer versions of LibTorch have no names for dimensions.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); })
    return tensor.has_names();
  else
    return false;
}

// Other tensors have more properties than a shape and strides.
bool is_ordinary(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !has_names(tensor) && !tensor.is_mkldnn();
}

bool is_deferred_in(const at::Tensor& tensor, const Account* account) {
  const Place* const place = place_of(tensor);
  return place != nullptr && place->account().get() == account && !place->memory()->plain;
}

// Whether the tensor has another owner, who may have to bring its content first.
bool is_somebody_elses(const at::Tensor& tensor, const Account* account) {
  const Place* const place = place_of(tensor);
  const bool was_ours = place != nullptr && place->account().get() == account;
  return intercept::is_tagged(tensor) && !was_ours;
}

// Undefined if a copy could not have the same strides, which decide how kernels add.
at::Tensor copy_of(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return {};
  const AsIs as_is;
  at::Tensor copy = tensor.detach().clone();
  // A wrapped number counts less than a tensor in the choice of a result's type.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

void add_unique(std::vector<Memory*>& memories, const Region& region) {
  Memory* const memory = region.memory.get();
  if (std::find(memories.begin(), memories.end(), memory) == memories.end())
    memories.push_back(memory);
}

// An argument is modified, not overwritten, if the same call also uses its memory elsewhere.
void correct_overwriting(std::vector<DeferredArgument>& deferred) {
  for (DeferredArgument& written : deferred) {
    if (written.access != Access::overwrite) continue;
    const bool used_elsewhere =
        std::any_of(deferred.begin(), deferred.end(), [&](const DeferredArgument& other) {
          return &other != &written && other.region.memory == written.region.memory;
        });
    if (used_elsewhere || !written.region.covers_memory) written.access = Access::modify;
  }
}

}  // namespace

Region::Region(const at::Tensor& tensor)
    : memory(place_of(tensor)->memory()),
      dtype(tensor.scalar_type()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      covers_memory(offset == 0 && tensor.is_non_overlapping_and_dense() &&
                    tensor.nbytes() == memory->bytes) {}

at::Tensor Region::on(const c10::Storage& storage) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

std::vector<Memory*> Record::inputs() const {
  std::vector<Memory*> memories;
  for (const DeferredArgument& argument : deferred)
    if (argument.access != Access::overwrite) add_unique(memories, argument.region);
  return memories;
}

std::vector<Memory*> Record::outputs() const {
  std::vector<Memory*> memories;
  for (const DeferredArgument& argument : deferred)
    if (argument.access != Access::read) add_unique(memories, argument.region);
  for (const Region& result : results) add_unique(memories, result);
  return memories;
}

std::optional<Record> capture(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments,
                              const Account* account) {
  Record record{.op = op};
  bool complete = true;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue kept = with_own_lists(arguments[i]);
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor, auto element) {
      if (!is_ordinary(tensor) || is_somebody_elses(tensor, account)) {
        complete = false;
      } else if (is_deferred_in(tensor, account)) {
        const Access access = !is_written(op, i)      ? Access::read
                              : is_overwritten(op, i) ? Access::overwrite
                                                      : Access::modify;
        record.deferred.push_back({Region(tensor), access, i, element});
        set_tensor(kept, element, at::Tensor());
      } else {
        const at::Tensor copy = is_written(op, i) ? at::Tensor() : copy_of(tensor);
        if (!copy.defined()) complete = false;
        set_tensor(kept, element, copy);
      }
    });
    if (!complete) return std::nullopt;
    record.arguments.push_back(std::move(kept));
  }
  correct_overwriting(record.deferred);
  return record;
}

void set_tensor(c10::IValue& argument, std::optional<std::size_t> element, at::Tensor tensor) {
  if (element)
    argument.toList().set(*element, c10::IValue(std::move(tensor)));
  else
    argument = c10::IValue(std::move(tensor));
}

c10::IValue with_own_lists(const c10::IValue& argument) {
  return argument.isList() ? c10::IValue(argument.toList().copy()) : argument;
}

namespace {

// Whether the value is all zero bits in any type.
bool is_zero(const c10::IValue& value) {
  if (!value.isInt() && !value.isDouble() && !value.isBool()) return false;
  const double number = value.toScalar().toDouble();
  return number == 0 && !std::signbit(number);
}

// Whether the memory that the record writes to is all zeros afterwards.
bool leaves_zeros(const Record& record) {
  if (!record.results.empty() || record.deferred.front().access != Access::overwrite) return false;
  const std::string& name = record.op.schema().name();
  if (name == "aten::zero_") return true;
  if (name == "aten::fill_") return is_zero(record.arguments[1]);
  return name == "aten::copy_" && record.deferred.size() == 2 &&
         record.deferred[1].region.memory->blank;
}

}  // namespace

void Log::append(Record record) {
  const std::size_t number = next_++;
  const bool blank = leaves_zeros(record);
  for (Memory* const memory : record.outputs()) {
    memory->writers.push_back(number);
    memory->blank = blank;
  }
  records_.emplace(number, std::move(record));
}

Log::Numbers Log::needed_for(std::span<const Memory* const> memories) const {
  return needed_for(memories, Held::is_there);
}

Log::Numbers Log::needed_for(std::span<const Memory* const> memories, Held held) const {
  // A memory as it was before the record with that number.
  using Version = std::pair<const Memory*, std::size_t>;
  std::vector<Version> open;
  for (const Memory* const memory : memories) open.emplace_back(memory, next_);
  Numbers needed;
  while (!open.empty()) {
    const auto [memory, number] = open.back();
    open.pop_back();
    if (held == Held::is_there && has_content_for(*memory, number)) continue;
    const auto& writers = memory->writers;
    const auto after = std::lower_bound(writers.begin(), writers.end(), number);
    if (after == writers.begin()) continue;
    const std::size_t writer = *std::prev(after);
    if (!needed.insert(writer).second) continue;
    // A memory that the writer modifies is one of its inputs, which leads to the writer before.
    for (const Memory* const input : records_.at(writer).inputs()) open.emplace_back(input, writer);
  }
  return needed;
}

void Log::forget_all_but(std::span<const Memory* const> memories) {
  const Numbers needed = needed_for(memories, Held::is_made_again);
  for (auto item = records_.begin(); item != records_.end();) {
    const auto& [number, record] = *item;
    if (needed.count(number) != 0) {
      ++item;
      continue;
    }
    for (Memory* const memory : record.outputs()) std::erase(memory->writers, number);
    item = records_.erase(item);
  }
}

bool has_content_for(const Memory& memory, std::size_t number) {
  return memory.holds_content() && (memory.writers.empty() || memory.writers.back() < number);
}

namespace {

c10::Storage storage_of(const Memory& memory) { return c10::Storage(memory.storage.lock()); }

// The memory of an intermediate result.
class Scratch {
 public:
  Scratch(std::size_t bytes, Account& account)
      : taken_(account, bytes),
        storage_(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), false) {}

  const c10::Storage& storage() const { return storage_; }

 private:
  Taken taken_;
  c10::Storage storage_;
};

class Replay {
 public:
  Replay(const Log& log, std::span<const Memory* const> memories, Account& account)
      : log_(log), account_(account), numbers_(log.needed_for(memories)) {
    for (const Memory* const memory : memories) targets_.emplace(memory, storage_of(*memory));
    for (const std::size_t number : numbers_) {
      for (const Memory* const memory : log.at(number).inputs()) last_use_[memory] = number;
      for (const Memory* const memory : log.at(number).outputs()) last_use_[memory] = number;
    }
  }

  void run() {
    const AsIs as_is;
    for (const std::size_t number : numbers_) run(number);
  }

 private:
  void run(std::size_t number) {
    const Record& record = log_.at(number);
    torch::jit::Stack stack = arguments(number);
    record.op.callBoxed(&stack);
    if (record.results.empty()) {
      stack.clear();
      drop(number, record.inputs());
    } else {
      place_results(number, std::move(stack));
    }
    drop(number, record.outputs());
  }

  torch::jit::Stack arguments(std::size_t number) {
    const Record& record = log_.at(number);
    torch::jit::Stack stack;
    for (const c10::IValue& argument : record.arguments) stack.push_back(with_own_lists(argument));
    for (const DeferredArgument& argument : record.deferred)
      set_tensor(stack[argument.argument], argument.element,
                 argument.region.on(storage_for(*argument.region.memory, number)));
    if (record.generator) stack[record.generator->argument] = generator_in(*record.generator);
    return stack;
  }

  // The storage in which this record finds a memory's content, or puts it.
  c10::Storage storage_for(const Memory& memory, std::size_t number) {
    if (has_content_for(memory, number)) return storage_of(memory);
    if (const auto target = targets_.find(&memory); target != targets_.end()) return target->second;
    return scratch_.try_emplace(&memory, memory.bytes, account_).first->second.storage();
  }

  // Frees the operator's inputs before its results are copied to their places.
  void place_results(std::size_t number, torch::jit::Stack returned) {
    const Record& record = log_.at(number);
    std::size_t bytes = 0;
    for (const c10::IValue& value : returned) bytes += value.toTensor().nbytes();
    const Taken taken(account_, bytes);
    drop(number, record.inputs());
    LOCKSTEP_CHECK(returned.size() == record.results.size());
    for (std::size_t i = 0; i < returned.size(); ++i) {
      const Region& region = record.results[i];
      const at::Tensor& result = returned[i].toTensor();
      LOCKSTEP_CHECK(result.sizes() == region.sizes && result.scalar_type() == region.dtype,
                     "{} was to return other tensors", record.op.schema().name());
      region.on(storage_for(*region.memory, number)).copy_(result);
    }
  }

  void drop(std::size_t number, const std::vector<Memory*>& memories) {
    for (const Memory* const memory : memories)
      if (last_use_.at(memory) == number) scratch_.erase(memory);
  }

  const Log& log_;
  Account& account_;
  Log::Numbers numbers_;
  std::unordered_map<const Memory*, c10::Storage> targets_;
  std::unordered_map<const Memory*, std::size_t> last_use_;
  std::unordered_map<const Memory*, Scratch> scratch_;
};

}  // namespace

void replay(const Log& log, std::span<const Memory* const> memories, Account& account) {
  Replay(log, memories, account).run();
}

}  // namespace lockstep::deferred

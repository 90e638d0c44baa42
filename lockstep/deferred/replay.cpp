#include <lockstep/deferred/replay.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/as_is.h>
#include <lockstep/deferred/random_draws.h>

namespace lockstep::deferred {

namespace {

c10::Storage storage_of(const Memory& memory) { return c10::Storage(memory.storage.lock()); }

// Memory for a content that is needed on the way only.
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

  // Where the content of a memory is, or comes to be, at the time of this record.
  c10::Storage storage_for(const Memory& memory, std::size_t number) {
    if (has_content_for(memory, number)) return storage_of(memory);
    if (const auto target = targets_.find(&memory); target != targets_.end()) return target->second;
    return scratch_.try_emplace(&memory, memory.bytes, account_).first->second.storage();
  }

  // What the operator read makes room before its results are copied to where they belong.
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

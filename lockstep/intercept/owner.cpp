#include <lockstep/intercept/owner.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Backtrace.h>
#include <c10/util/Logging.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/library.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/mode.h>

namespace lockstep::intercept {

namespace {

// Which memory has which owners. There is one for the process, because the dispatcher calls plain
// functions. Threading: any. An entry lasts until the last tensor in its memory is gone, so that
// new memory at the same address is never taken for it.
class Owners {
 public:
  static Owners& instance();

  void add(const c10::Storage& memory, const std::shared_ptr<Owner>& owner, std::string when_gone,
           Turn turn);
  void remove(const c10::Storage& memory, const Owner* owner);

  // Appends the owners of a memory that are not in the list yet. UsageError where an owner with a
  // message for that is gone.
  void find(const c10::StorageImpl* memory, std::vector<std::shared_ptr<Owner>>& owners) const;
  bool owns(const c10::StorageImpl* memory, const Owner* owner) const;
  // Whether any owner has a memory that is not there at present.
  bool any_without_memory() const;

 private:
  struct Entry {
    std::weak_ptr<Owner> owner;
    const Owner* address = nullptr;
    std::string when_gone;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> lives;
    std::vector<Entry> entries;
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
  // How many memories there may be before dead ones are looked for. Looking at every add() would
  // take quadratic time.
  std::size_t look_for_the_dead_at_ = 0;
};

Owners& Owners::instance() {
  static Owners* const all = new Owners;  // outlives every thread that still computes
  return *all;
}

void Owners::add(const c10::Storage& memory, const std::shared_ptr<Owner>& owner,
                 std::string when_gone, Turn turn) {
  const std::unique_lock lock(mutex_);
  if (memories_.size() >= look_for_the_dead_at_) {
    std::erase_if(memories_, [](const auto& item) { return item.second.lives.expired(); });
    look_for_the_dead_at_ = 2 * memories_.size() + 16;
  }
  const auto [place, added] = memories_.try_emplace(
      memory.unsafeGetStorageImpl(),
      Memory{c10::weak_intrusive_ptr<c10::StorageImpl>(memory.getWeakStorageImpl()), {}});
  auto& entries = place->second.entries;
  std::erase_if(entries, [&](const Entry& entry) { return entry.address == owner.get(); });
  entries.insert(turn == Turn::first ? entries.begin() : entries.end(),
                 {owner, owner.get(), std::move(when_gone)});
}

void Owners::remove(const c10::Storage& memory, const Owner* owner) {
  const std::unique_lock lock(mutex_);
  const auto found = memories_.find(memory.unsafeGetStorageImpl());
  if (found == memories_.end()) return;
  std::erase_if(found->second.entries, [&](const Entry& entry) { return entry.address == owner; });
  if (found->second.entries.empty()) memories_.erase(found);
}

void Owners::find(const c10::StorageImpl* memory,
                  std::vector<std::shared_ptr<Owner>>& owners) const {
  const std::shared_lock lock(mutex_);
  const auto found = memories_.find(memory);
  if (found == memories_.end()) return;
  for (const Entry& entry : found->second.entries) {
    if (auto owner = entry.owner.lock()) {
      if (std::ranges::find(owners, owner) == owners.end()) owners.push_back(std::move(owner));
    } else if (!entry.when_gone.empty()) {
      throw UsageError("{}", entry.when_gone);
    }
  }
}

bool Owners::owns(const c10::StorageImpl* memory, const Owner* owner) const {
  const std::shared_lock lock(mutex_);
  const auto found = memories_.find(memory);
  return found != memories_.end() &&
         std::ranges::any_of(found->second.entries,
                             [&](const Entry& entry) { return entry.address == owner; });
}

bool Owners::any_without_memory() const {
  const std::shared_lock lock(mutex_);
  return std::ranges::any_of(memories_, [](const auto& item) {
    const auto memory = item.second.lives.lock();
    return memory && memory->data_ptr().get() == nullptr;
  });
}

// LibTorch calls this before it writes the first byte of an archive.
torch::jit::ExtraFilesMap ask_owners(const torch::jit::Module& archive) {
  c10::IValue(archive._ivalue()).visit([](const c10::IValue& value) {
    if (value.isTensor())
      for (const auto& owner : owners_of(value.toTensor())) owner->on_save(value.toTensor());
    return false;  // go on with what is inside
  });
  return {};
}

// Parts of the names of functions in which LibTorch finds that a tensor has no memory.
constexpr std::array<std::string_view, 2> kReaders = {"data_ptr<", "throw_storage_access_error"};

// Whether the error that is being made has a text with values in it, as that about a tensor of
// another type than the reader's. That about memory has none, and so another constructor.
bool has_values_in_text() {
  const std::string stack = c10::get_backtrace(/*frames_to_skip=*/0);
  const auto check = stack.find("torchCheckFail(");
  return check != std::string::npos &&
         std::string_view(stack).substr(check, stack.find('\n', check) - check).find("std::") !=
             std::string_view::npos;
}

std::string stack_with_advice() {
  // The stack without this function and its callers in c10.
  std::string stack = c10::get_backtrace(/*frames_to_skip=*/3);
  if (std::ranges::none_of(
          kReaders,
          [&](std::string_view reader) { return stack.find(reader) != std::string::npos; }) ||
      !Owners::instance().any_without_memory() || has_values_in_text())
    return stack;
  // Which tensor it is about is not known here.
  return "Lockstep: if this tensor is a parameter that is cut over ranks (FULL_SHARD, "
         "HYBRID_SHARD, parallelize_module), it has memory of its own only while an operator uses "
         "it: read it while what full_parameters() returned lives, or take the values that "
         "full_state_dict() returns\n" +
         stack;
}

void hear_of_memory_readers() {
  torch::jit::SetExportModuleExtraFilesHook(ask_owners);
  c10::SetStackTraceFetcher(std::function<std::string()>(stack_with_advice));
}

// The tensor arguments of a call that carry the key.
class TaggedArguments {
 public:
  void collect(const c10::FunctionSchema& schema, std::span<const c10::IValue> arguments) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::IValue& value = arguments[i];
      const auto* const alias = schema.arguments()[i].alias_info();
      const bool written = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        add(value.toTensor(), written);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) add(tensor, written);
      } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef())
          if (element.isTensor()) add(element.toTensor(), written);
      }
    }
  }

  const std::vector<Use>& uses() const { return uses_; }

 private:
  void add(const at::Tensor& tensor, bool written) {
    if (is_tagged(tensor) && tensor.has_storage()) uses_.push_back({tensor, written});
  }

  std::vector<Use> uses_;
};

// Works for a tensor without memory, too, whose storage() may throw.
const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

class RunningCall final : public Call {
 public:
  RunningCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : Call(op, keys, stack) {
    arguments_.collect(op.schema(), arguments());
    for (const Use& use : arguments_.uses())
      Owners::instance().find(memory_of(use.tensor), owners_);
  }

  void proceed() override {
    if (next_ < owners_.size()) {
      Owner& owner = *owners_[next_++];
      owner.on_call(*this, uses_of(owner));
      return;
    }
    if (decomposes_) {
      // This key set, and no guard: a guard would also hold for the operators inside.
      op().redispatchBoxed(keys() & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey),
                           &stack());
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    op().callBoxed(&stack());
  }

  void decompose() override {
    decomposes_ = true;
    proceed();
  }

 private:
  // Nearly always there is one owner with one use, which needs no list of its own.
  std::span<const Use> uses_of(const Owner& owner) {
    if (owners_.size() == 1 && arguments_.uses().size() == 1) return arguments_.uses();
    uses_of_owner_.emplace_back();
    for (const Use& use : arguments_.uses())
      if (Owners::instance().owns(memory_of(use.tensor), &owner))
        uses_of_owner_.back().push_back(use);
    return uses_of_owner_.back();
  }

  TaggedArguments arguments_;
  std::vector<std::shared_ptr<Owner>> owners_;
  std::size_t next_ = 0;
  bool decomposes_ = false;  // an owner asked for it
  std::vector<std::vector<Use>> uses_of_owner_;
};

thread_local std::exception_ptr* error_to_keep = nullptr;

void on_owned_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  try {
    RunningCall(op, keys, *stack).proceed();
  } catch (const Error&) {
    if (error_to_keep != nullptr) *error_to_keep = std::current_exception();
    throw;
  }
}

void register_function() {
  // This is done at run time because the linker may drop static initialisers of a static library.
  // It is never undone: threads may compute until the process ends.
  auto* const library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&on_owned_operator>());
}

// For the trial: writes 3 to the memory of a tensor when it is used.
class FillOnUse final : public Owner {
 public:
  void on_call(Call& call, std::span<const Use> uses) override {
    for (const Use& use : uses) *static_cast<float*>(use.tensor.storage().data_ptr().get()) = 3;
    call.proceed();
  }
};

void check_key_leads_here() {
  const c10::NoGradGuard no_grad;
  const auto owner = std::make_shared<FillOnUse>();
  const at::Tensor tensor = at::zeros({1}, at::kFloat);
  std::string wrong;
  try {
    tag(tensor);
    add_owner(tensor.storage(), owner);
    const at::Tensor sum = at::cat({tensor.view({1}), at::ones({1})}).sum();
    if (sum.item<float>() != 4) wrong = "its owner was not asked";
  } catch (const c10::Error& error) {
    wrong = error.what_without_backtrace();
  }
  if (!wrong.empty())
    throw UsageError("parameters cannot be sharded, batch norms not synchronised and no_sync() not "
                     "watched over with this LibTorch ({}), as a tensor showed when it was tried: "
                     "{}. Use a LibTorch that Lockstep was tested with (docs/tested.md)",
                     TORCH_VERSION, wrong);
}

// `tensor` becomes an alias of `other` with these keys.
void set_alias(const at::Tensor& tensor, const at::Tensor& other, c10::DispatchKeySet keys) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unheard(kKey);
  auto alias =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(other.storage()), keys, other.dtype());
  alias->set_sizes_and_strides(other.sizes(), other.strides());
  alias->set_storage_offset(other.storage_offset());
  tensor.set_data(at::Tensor(std::move(alias)));
}

}  // namespace

KeptError::KeptError() : outer_(std::exchange(error_to_keep, &error_)) {}

KeptError::~KeptError() { error_to_keep = outer_; }

void KeptError::rethrow_if_any() const {
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void claim_key() {
  // Two steps: after a failed check, a second call must not take our own function for another
  // library's.
  static const bool registered = [] {
    check_key_is_free(kKey,
                      "shards parameters, synchronises batch norms and watches over no_sync()");
    register_function();
    hear_of_memory_readers();
    return true;
  }();
  static const bool works = [] {
    check_key_leads_here();
    return true;
  }();
  LOCKSTEP_CHECK(registered && works);
}

void add_owner(const c10::Storage& memory, const std::shared_ptr<Owner>& owner,
               std::string when_gone, Turn turn) {
  Owners::instance().add(memory, owner, std::move(when_gone), turn);
}

void remove_owner(const c10::Storage& memory, const Owner* owner) {
  Owners::instance().remove(memory, owner);
}

std::vector<std::shared_ptr<Owner>> owners_of(const at::Tensor& tensor) {
  std::vector<std::shared_ptr<Owner>> owners;
  if (tensor.defined() && tensor.has_storage()) Owners::instance().find(memory_of(tensor), owners);
  return owners;
}

std::shared_ptr<PartOwner> part_owner_of(const at::Tensor& parameter) {
  if (!is_tagged(parameter)) return nullptr;
  for (const auto& owner : owners_of(parameter))
    if (auto whole = std::dynamic_pointer_cast<PartOwner>(owner)) return whole;
  return nullptr;
}

bool is_tagged(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kKey); }

void tag(const at::Tensor& tensor) { set_alias(tensor, tensor, tensor.key_set().add(kKey)); }

void untag(const at::Tensor& tensor) { set_alias(tensor, tensor, tensor.key_set().remove(kKey)); }

void place_tagged(const at::Tensor& tensor, const at::Tensor& other) {
  set_alias(tensor, other, tensor.key_set().add(kKey));
}

}  // namespace lockstep::intercept

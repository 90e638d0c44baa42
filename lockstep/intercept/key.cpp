#include <lockstep/intercept/key.h>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/free_key.h>
#include <lockstep/intercept/memory_readers.h>
#include <lockstep/intercept/owners.h>

namespace lockstep::intercept {

namespace {

// The tensor arguments of a call that carry the key, each with where it stands.
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

// Also of a tensor whose storage() throws, as that of one without memory may.
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
      // With this set instead of a guard, which would hold for the operators inside as well.
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
  // All of them where there is one owner, as nearly always.
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

void on_owned_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  RunningCall(op, keys, *stack).proceed();
}

void register_function() {
  // At run time, as the linker may drop static initialisers of a static library. Never
  // unregistered: threads may compute until the process ends.
  auto* const library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&on_owned_operator>());
}

// Fills the memory of a tensor that is used before anyone wrote to it.
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
    throw UsageError("parameters cannot be sharded nor batch norms synchronised with this LibTorch "
                     "({}), as a tensor showed when it was tried: {}. Use a LibTorch that Lockstep "
                     "was tested with (docs/tested.md)",
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

void claim_key() {
  // In two steps: what was registered before a check failed must not be taken for somebody else's.
  static const bool registered = [] {
    check_key_is_free(kKey, "shards parameters and synchronises batch norms");
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
               std::string when_gone) {
  Owners::instance().add(memory, owner, std::move(when_gone));
}

void remove_owner(const c10::Storage& memory, const Owner* owner) {
  Owners::instance().remove(memory, owner);
}

std::vector<std::shared_ptr<Owner>> owners_of(const at::Tensor& tensor) {
  std::vector<std::shared_ptr<Owner>> owners;
  if (tensor.defined() && tensor.has_storage()) Owners::instance().find(memory_of(tensor), owners);
  return owners;
}

bool is_tagged(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kKey); }

void tag(const at::Tensor& tensor) { set_alias(tensor, tensor, tensor.key_set().add(kKey)); }

void untag(const at::Tensor& tensor) { set_alias(tensor, tensor, tensor.key_set().remove(kKey)); }

void place_tagged(const at::Tensor& tensor, const at::Tensor& other) {
  set_alias(tensor, other, tensor.key_set().add(kKey));
}

}  // namespace lockstep::intercept

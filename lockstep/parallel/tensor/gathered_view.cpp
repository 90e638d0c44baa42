#include <lockstep/parallel/tensor/gathered_view.h>

#include <memory>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::tensor {

namespace {

class GatheredView final : public intercept::Owner {
 public:
  GatheredView(const at::Tensor& part, std::string op)
      : part_(part.detach()), version_(part._version()), op_(std::move(op)) {}

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override {
    const std::string& called = call.op().operator_name().name;
    for (const intercept::Use& use : uses)
      if (use.written && called != "aten::requires_grad_")
        throw UsageError("{} writes to what {} gave of a tensor that is cut over ranks, and is a "
                         "copy: the tensor itself would not change. Write to a clone(), or to the "
                         "tensor",
                         called, op_);
    check_current(called);
    call.proceed();
  }
  void on_save(const at::Tensor&) const override { check_current("torch::save()"); }

 private:
  void check_current(const std::string& reader) const {
    if (part_._version() != version_)
      throw UsageError("{} uses what {} gave of a tensor that is cut over ranks, and is a copy, "
                       "after that tensor was written to: call {} again",
                       reader, op_, op_);
  }

  at::Tensor part_;
  std::int64_t version_;
  std::string op_;
};

// What a storage's memory is freed by, and the owner that lives as long.
struct Kept {
  c10::DataPtr memory;
  std::shared_ptr<GatheredView> owner;
};

void delete_kept(void* kept) { delete static_cast<Kept*>(kept); }

}  // namespace

void guard_view(const at::Tensor& view, const at::Tensor& part, const std::string& op) {
  if (view.numel() == 0 || part.is_inference()) return;
  const auto owner = std::make_shared<GatheredView>(part, op);
  auto* const storage = view.storage().unsafeGetStorageImpl();
  auto kept = std::make_unique<Kept>();
  kept->owner = owner;
  void* const address = storage->data_ptr().get();
  const c10::Device device = storage->data_ptr().device();
  kept->memory = storage->set_data_ptr(c10::DataPtr(address, nullptr, &delete_kept, device));
  storage->set_data_ptr(c10::DataPtr(address, kept.release(), &delete_kept, device));
  intercept::tag(view);
  intercept::add_owner(view.storage(), owner);
}

}  // namespace lockstep::tensor

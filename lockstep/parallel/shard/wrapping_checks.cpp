#include <lockstep/parallel/shard/wrapping_checks.h>

#include <algorithm>
#include <map>
#include <set>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/save_guard.h>
#include <lockstep/parallel/shard/parameter_gatherer.h>

namespace lockstep::shard {

void refuse_sharded(const torch::nn::Module& module) {
  const auto refuse = [](const std::string& name) {
    throw UsageError("'{}' is sharded already: call wrap_model() once for a model, and not for a "
                     "part of one that was wrapped",
                     name);
  };
  for (const auto& parameter : data_parallel::held_parameters(module))
    for (const auto& owner : intercept::owners_of(parameter.value()))
      if (dynamic_cast<const ParameterGatherer*>(owner.get()) != nullptr) refuse(parameter.key());
  if (data_parallel::has_save_guard(module, kSaveGuard)) refuse(module.name());
}

namespace {

// Elements of a memory that one parameter may touch.
struct Extent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::string name;
};

Extent extent_of(const NamedTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {tensor.storage_offset(), tensor.storage_offset() + last + 1, parameter.name};
}

// The tensors that are known to lie in one memory.
struct Users {
  std::vector<Extent> extents;
  std::set<const void*> tensors;
  std::size_t count = 0;
};

}  // namespace

std::string shared_memory_fault(const std::vector<NamedTensor>& parameters) {
  std::map<const void*, Users> memories;
  for (const NamedTensor& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (!tensor.has_storage() || tensor.numel() == 0) continue;
    Users& users = memories[tensor.storage().unsafeGetStorageImpl()];
    users.count = tensor.storage().use_count();
    users.extents.push_back(extent_of(parameter));
    users.tensors.insert(tensor.unsafeGetTensorImpl());
    // A view keeps what it is a view of.
    if (tensor.is_view()) users.tensors.insert(tensor._base().unsafeGetTensorImpl());
  }
  for (auto& [memory, users] : memories) {
    std::ranges::sort(users.extents, {}, &Extent::begin);
    for (std::size_t i = 1; i < users.extents.size(); ++i)
      if (users.extents[i].begin < users.extents[i - 1].end)
        return fmt::format("'{}' and '{}' are parameters of their own that lie in the same memory, "
                           "which they would not when it is cut: register one tensor under both "
                           "names, or give each its own with clone()",
                           users.extents[i - 1].name, users.extents[i].name);
    if (users.count > users.tensors.size())
      return fmt::format("the memory of '{}' has {} more user{}, as a view of it (t(), view()), "
                         "detach(), data() or a result that backward() can still be called on has, "
                         "and which would go on with old values: make those after wrap_model(), or "
                         "in forward",
                         users.extents.front().name, users.count - users.tensors.size(),
                         users.count - users.tensors.size() == 1 ? "" : "s");
  }
  return "";
}

}  // namespace lockstep::shard

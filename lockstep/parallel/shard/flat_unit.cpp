#include <lockstep/parallel/shard/flat_unit.h>

#include <limits>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/key.h>
#include <lockstep/parallel/shard/absent_memory.h>

namespace lockstep::shard {

namespace {

std::vector<std::int64_t> sizes_of(const std::vector<NamedTensor>& parameters) {
  std::vector<std::int64_t> sizes;
  for (const NamedTensor& parameter : parameters) sizes.push_back(parameter.tensor.numel());
  return sizes;
}

at::TensorOptions options_of(const at::Tensor& tensor, std::optional<c10::Device> device) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(device.value_or(tensor.device()));
}

}  // namespace

FlatUnit::FlatUnit(PlannedUnit plan, std::shared_ptr<comm::Communicator> group,
                   std::shared_ptr<BufferPool> gathered_memory, std::optional<c10::Device> device)
    : name_(std::move(plan.name)),
      parameters_(std::move(plan.parameters)),
      group_(std::move(group)),
      gathered_memory_(std::move(gathered_memory)),
      layout_(sizes_of(parameters_), group_->size()),
      is_trained_(parameters_.front().tensor.requires_grad()),
      flat_(tensor_without_memory({layout_.num_padded()},
                                  options_of(parameters_.front().tensor, device))) {}

std::int64_t FlatUnit::gathered_bytes() const {
  return layout_.num_padded() * static_cast<std::int64_t>(flat_.element_size());
}

void FlatUnit::adopt(comm::Communicator& first_among, const Origin& origin) {
  const c10::NoGradGuard no_grad;
  const bool first = first_among.rank() == 0;
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters_) tensors.push_back(parameter.tensor);
  const std::shared_ptr<void> values = first && origin.values ? origin.values(tensors) : nullptr;
  if (residence() == Residence::gathered) {
    // For good, and where the transport reaches it.
    const at::Tensor memory = device().is_cpu()
                                  ? group_->allocate({layout_.num_padded()}, flat_.scalar_type())
                                  : at::empty({layout_.num_padded()}, options());
    flat_ = memory;
    is_there_ = true;
  } else {
    take_memory();
  }
  flat_.narrow(0, layout_.num_elements(), layout_.num_padded() - layout_.num_elements()).zero_();
  for (std::size_t member = 0; member < parameters_.size(); ++member) {
    const at::Tensor& tensor = parameters_[member].tensor;
    const mesh::Interval range = layout_.range(member);
    if (first) flat_.narrow(0, range.begin, range.size()).copy_(tensor.detach().reshape({-1}));
    const at::Tensor view = flat_.narrow(0, range.begin, range.size()).view(tensor.sizes());
    // What is always there takes no detour.
    if (residence() == Residence::gathered)
      tensor.set_data(view);
    else
      intercept::place_tagged(tensor, view);
  }
  first_among.broadcast(flat_, 0).wait();
  const mesh::Interval mine = layout_.part(group_->rank());
  const at::Tensor in_flat = flat_.narrow(0, mine.begin, mine.size());
  if (residence() == Residence::gathered) {
    part_ = in_flat;
  } else {
    part_ = device().is_cpu() ? group_->allocate({mine.size()}, flat_.scalar_type())
                              : at::empty({mine.size()}, options());
    part_.copy_(in_flat);
  }
}

at::Tensor FlatUnit::piece(std::size_t member) const {
  const int rank = group_->rank();
  return part_.narrow(0, layout_.piece_offset(member, rank), layout_.piece(member, rank).size());
}

mesh::Placement FlatUnit::placement(std::size_t member) const {
  return mesh::Placement::full(parameters_[member].tensor.sizes().vec())
      .cut_flat(layout_.piece(member, group_->rank()));
}

void FlatUnit::take_memory() {
  LOCKSTEP_CHECK(!is_there_, "the memory of {} is taken twice", name_);
  c10::StorageImpl* const memory = flat_.storage().unsafeGetStorageImpl();
  memory->set_data_ptr_noswap(gathered_memory_->take(gathered_bytes()));
  memory->set_nbytes(static_cast<std::size_t>(gathered_bytes()));
  is_there_ = true;
}

void FlatUnit::give_memory_back(bool scrub) {
  if (!is_there_ || residence() == Residence::gathered) return;
  const c10::NoGradGuard no_grad;
  if (scrub && at::isFloatingType(flat_.scalar_type()))
    flat_.fill_(std::numeric_limits<double>::quiet_NaN());
  c10::StorageImpl* const memory = flat_.storage().unsafeGetStorageImpl();
  memory->set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  // With no bytes a stray access throws instead of reading what is not there.
  memory->set_nbytes(0);
  is_there_ = false;
}

comm::Work FlatUnit::gather(const comm::CallOptions& options) {
  return group_->all_gather(flat_, part_, options);
}

void FlatUnit::keep_edits() {
  if (residence() == Residence::gathered) return;
  const c10::NoGradGuard no_grad;
  const mesh::Interval mine = layout_.part(group_->rank());
  part_.copy_(flat_.narrow(0, mine.begin, mine.size()));
}

void FlatUnit::replace(const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  const mesh::Interval mine = layout_.part(group_->rank());
  part_.copy_(whole.narrow(0, mine.begin, mine.size()));
  if (is_there_) flat_.copy_(whole);
}

}  // namespace lockstep::shard

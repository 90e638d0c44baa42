#include <lockstep/parallel/shard/flat_unit.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <spdlog/fmt/fmt.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {

FlatLayout::FlatLayout(std::span<const std::int64_t> sizes, int num_ranks) : num_ranks_(num_ranks) {
  std::int64_t next = 0;
  for (const std::int64_t size : sizes) {
    ranges_.push_back({next, next + size});
    next += size;
  }
  part_ = shard::part_size(next, num_ranks);
}

mesh::Interval FlatLayout::piece(std::size_t member, int rank) const {
  const mesh::Interval whole = ranges_[member];
  const mesh::Interval mine = part(rank);
  const std::int64_t begin = std::clamp(mine.begin, whole.begin, whole.end);
  const std::int64_t end = std::clamp(mine.end, whole.begin, whole.end);
  return {begin - whole.begin, end - whole.begin};
}

std::int64_t FlatLayout::piece_offset(std::size_t member, int rank) const {
  return std::clamp(ranges_[member].begin - part(rank).begin, std::int64_t{0}, part_);
}

UnitFormat UnitFormat::of(at::ScalarType own, c10::Device device) {
  return {.given = own,
          .own = own,
          .gathered = own,
          .sent = own,
          .reduced = own,
          .device = device,
          .stepped_on = device,
          .sent_from = device};
}

UnitFormat UnitFormat::of(at::ScalarType own, c10::Device device, const MixedPrecision& precision,
                          const CPUOffload& offload) {
  UnitFormat format = of(own, device);
  if (own == at::kFloat) {
    format.sent = precision.param_dtype.value_or(own);
    format.reduced = precision.reduce_dtype.value_or(own);
    if (computes_in_param_dtype(precision, device)) format.gathered = format.sent;
    format.own = precision.master_dtype.value_or(own);
  }
  if (offload.offload_optimizer) format.stepped_on = at::kCPU;
  if (offload.offload_params) format.sent_from = at::kCPU;
  return format;
}

namespace {

// The size that a storage shows while it has no memory. LibTorch 1 refuses to write a size without
// memory, so that pickle_save(), which asks nobody, fails. LibTorch 2 would read there: it finds no
// bytes.
std::size_t size_without_memory(std::size_t bytes) { return TORCH_VERSION_MAJOR < 2 ? bytes : 0; }

}  // namespace

at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  c10::Storage memory(c10::Storage::use_byte_size_t(), size_without_memory(bytes),
                      c10::DataPtr(nullptr, options.device()),
                      /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, options).set_(std::move(memory));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

namespace {

std::vector<std::int64_t> sizes_of(const std::vector<NamedTensor>& parameters) {
  std::vector<std::int64_t> sizes;
  for (const NamedTensor& parameter : parameters) sizes.push_back(parameter.tensor.numel());
  return sizes;
}

}  // namespace

FlatUnit::FlatUnit(PlannedUnit plan, std::shared_ptr<comm::Communicator> group,
                   std::shared_ptr<BufferPool> gathered_memory, const UnitFormat& format,
                   std::shared_ptr<comm::Communicator> node)
    : name_(std::move(plan.name)),
      parameters_(std::move(plan.parameters)),
      group_(std::move(group)),
      gathered_memory_(std::move(gathered_memory)),
      layout_(sizes_of(parameters_), group_->size()),
      format_(format),
      is_trained_(parameters_.front().tensor.requires_grad()),
      flat_(tensor_without_memory({layout_.num_padded()}, options(format.gathered))),
      node_(std::move(node)) {}

at::TensorOptions FlatUnit::options(at::ScalarType type) const {
  return at::TensorOptions().dtype(type).device(device());
}

std::int64_t FlatUnit::gathered_bytes() const {
  return layout_.num_padded() * static_cast<std::int64_t>(flat_.element_size());
}

std::int64_t FlatUnit::device_bytes_at_rest() const {
  std::int64_t total = residence() == Residence::gathered ? gathered_bytes() : 0;
  if (part_.device() == device() && !part_.is_alias_of(flat_))
    total += static_cast<std::int64_t>(part_.nbytes());
  if (!part_is_sent() && sent_.device() == device() && !sent_.is_alias_of(flat_))
    total += static_cast<std::int64_t>(sent_.nbytes());
  return total;
}

std::int64_t FlatUnit::host_bytes_at_rest() const {
  if (device().is_cpu()) return 0;
  std::int64_t total = part_.is_cpu() ? static_cast<std::int64_t>(part_.nbytes()) : 0;
  if (!part_is_sent() && sent_.is_cpu()) total += static_cast<std::int64_t>(sent_.nbytes());
  return total;
}

at::Tensor FlatUnit::new_part(at::ScalarType type, c10::Device place) const {
  if (place != device()) return device::host_memory(layout_.part_size(), type, device());
  // Where the transport reaches it.
  return place.is_cpu() ? group_->allocate({layout_.part_size()}, type)
                        : at::empty({layout_.part_size()}, options(type));
}

at::Tensor FlatUnit::mine_of(const at::Tensor& whole) const {
  const mesh::Interval mine = layout_.part(group_->rank());
  return whole.narrow(0, mine.begin, mine.size());
}

void FlatUnit::place_parameter(std::size_t member) const {
  const at::Tensor& tensor = parameters_[member].tensor;
  const mesh::Interval range = layout_.range(member);
  const at::Tensor view = flat_.narrow(0, range.begin, range.size()).view(tensor.sizes());
  if (has_owner())
    intercept::place_tagged(tensor, view);
  else
    tensor.set_data(view);
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
                                  ? group_->allocate({layout_.num_padded()}, format_.gathered)
                                  : at::empty({layout_.num_padded()}, options(format_.gathered));
    flat_ = memory;
    is_there_ = true;
  } else {
    take_memory();
  }
  const at::Tensor all = format_.gathered == format_.own
                             ? flat_
                             : at::empty({layout_.num_padded()}, options(format_.own));
  all.narrow(0, layout_.num_elements(), layout_.num_padded() - layout_.num_elements()).zero_();
  for (std::size_t member = 0; member < parameters_.size(); ++member) {
    const mesh::Interval range = layout_.range(member);
    if (first)
      all.narrow(0, range.begin, range.size())
          .copy_(parameters_[member].tensor.detach().reshape({-1}));
    place_parameter(member);
  }
  first_among.broadcast(all, 0).wait();

  const bool always_there = residence() == Residence::gathered;
  if (always_there && format_.is_one()) {
    part_ = mine_of(flat_);
  } else {
    part_ = new_part(format_.own, format_.stepped_on);
    part_.copy_(mine_of(all));
  }
  if (format_.sent == format_.own && format_.sent_from == format_.stepped_on)
    sent_ = part_;
  else if (always_there && format_.sent == format_.gathered && format_.sent_from == device())
    sent_ = mine_of(flat_);
  else
    sent_ = new_part(format_.sent, format_.sent_from);
  // Every rank has what it would get from the others.
  if (!format_.is_one()) flat_.copy_(all.to(format_.sent));
  part_changed();
}

std::size_t FlatUnit::take_back() {
  const c10::NoGradGuard no_grad;
  std::size_t num_taken = 0;
  for (std::size_t member = 0; member < parameters_.size(); ++member) {
    const auto& [name, parameter] = parameters_[member];
    if (parameter.storage().is_alias_of(flat_.storage())) continue;
    if (parameter.scalar_type() != format_.gathered || parameter.device() != device() ||
        parameter.numel() != layout_.range(member).size())
      throw UsageError("'{}' is of another type, shape or device than when the model was wrapped, "
                       "as after to(device), to(dtype) and set_data(), so that its optimizer would "
                       "step on nothing: convert the model before wrap_model()",
                       name);
    const mesh::Interval range = layout_.range(member);
    flat_.narrow(0, range.begin, range.size()).copy_(parameter.detach().reshape({-1}));
    place_parameter(member);
    ++num_taken;
  }
  if (num_taken > 0) part_changed();
  return num_taken;
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
  as_edited_ = at::Tensor();
  memory->set_nbytes(size_without_memory(static_cast<std::size_t>(gathered_bytes())));
  is_there_ = false;
}

at::Tensor FlatUnit::take(std::int64_t elements, at::ScalarType type) const {
  return gathered_memory_ == nullptr ? at::empty({elements}, options(type))
                                     : gathered_memory_->take(elements, options(type));
}

at::Tensor FlatUnit::mine_in_node(const at::Tensor& whole) const {
  const std::int64_t size = layout_.num_padded() / node_->size();
  return whole.narrow(0, node_->rank() * size, size);
}

void FlatUnit::start_gather(const comm::CallOptions& options) {
  const c10::NoGradGuard no_grad;
  if (node_part_.defined()) {
    gathering_ = node_->all_gather(flat_, node_part_, options);
    return;
  }
  leaving_ = sent_.device() == device() ? sent_ : sent_.to(device(), /*non_blocking=*/true);
  if (format_.quantized) {
    quantized_.emplace(
        *group_, flat_, leaving_,
        comm::QuantizedGatherOptions{.call = options, .memory = [this](std::int64_t bytes) {
                                       return take(bytes, at::kByte);
                                     }});
  } else if (format_.sent == format_.gathered) {
    gathering_ = group_->all_gather(flat_, leaving_, options);
  } else {
    incoming_ = take(layout_.num_padded(), format_.sent);
    gathering_ = group_->all_gather(incoming_, leaving_, options);
  }
}

void FlatUnit::finish_gather() {
  const c10::NoGradGuard no_grad;
  gathering_.wait();
  if (quantized_) quantized_->wait();
  if (incoming_.defined()) flat_.copy_(incoming_);
  as_edited_ = at::Tensor();
  if (node_ != nullptr && !node_part_.defined()) {
    node_part_ = take(layout_.num_padded() / node_->size(), format_.gathered);
    node_part_.copy_(mine_in_node(flat_));
  }
  gathering_ = comm::Work();
  quantized_.reset();
  incoming_ = at::Tensor();
  leaving_ = at::Tensor();
}

void FlatUnit::abandon_gather() {
  // Decoded into memory that is about to go: messages may be used again once that is on its way.
  if (quantized_) quantized_->wait();
  gathering_.wait_on_host();
  gathering_ = comm::Work();
  quantized_.reset();
  incoming_ = at::Tensor();
  leaving_ = at::Tensor();
}

void FlatUnit::part_changed() {
  const c10::NoGradGuard no_grad;
  if (!part_is_sent()) sent_.copy_(part_, /*non_blocking=*/true);
  node_part_ = at::Tensor();
}

// This rank's part as a gather delivers it.
at::Tensor FlatUnit::as_gathered(const at::Tensor& own) const {
  const at::Tensor sent = own.to(format_.sent);
  return format_.quantized ? comm::quantized_and_back(sent, format_.gathered)
                           : sent.to(format_.gathered);
}

// Where the part has more digits than what is gathered, those of elements that nobody has written
// to are kept.
void FlatUnit::keep_edits() {
  if (part_.is_alias_of(flat_)) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor now = mine_of(flat_);
  if (format_.is_one() && !format_.quantized) {
    part_.copy_(now);
  } else {
    const at::Tensor own = part_.to(device());
    const at::Tensor before = as_edited_.defined() ? as_edited_ : as_gathered(own);
    part_.copy_(at::where(now == before, own, now.to(format_.own)));
    as_edited_ = now.clone();
  }
  part_changed();
}

at::Tensor FlatUnit::whole() {
  const c10::NoGradGuard no_grad;
  const at::Tensor all = at::empty({layout_.num_padded()}, options(format_.own));
  group_->all_gather(all, part_.to(device())).wait();
  return all;
}

void FlatUnit::replace(const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  part_.copy_(mine_of(whole));
  part_changed();
  if (is_there_) flat_.copy_(whole.to(format_.sent));
}

namespace {

struct Row {
  std::string name, tensors, elements, dtype, place;
};

Row row_of(const FlatUnit& unit) {
  const bool sharded = unit.residence() == Residence::sharded;
  return {unit.name() + (unit.is_trained() ? "" : " (frozen)"),
          std::to_string(unit.parameters().size()), std::to_string(unit.layout().num_elements()),
          c10::toString(unit.format().gathered),
          sharded ? fmt::format("{} on each rank, gathered when used", unit.layout().part_size())
                  : std::string("whole on every rank")};
}

}  // namespace

std::int64_t count_parameters(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::int64_t total = 0;
  for (const auto& unit : units) total += unit->layout().num_elements();
  return total;
}

std::string describe_units(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::vector<Row> rows{{"unit", "tensors", "elements", "type", "between steps"}};
  for (const auto& unit : units) rows.push_back(row_of(*unit));
  std::size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  std::string text;
  for (const Row& row : rows)
    text += fmt::format("{:<{}}  {:>7}  {:>12}  {:<8}  {}\n", row.name, width, row.tensors,
                        row.elements, row.dtype, row.place);
  return text +
         fmt::format("{} units, {} parameters in all", units.size(), count_parameters(units));
}

std::string with_unit_names(std::string text, std::span<const std::unique_ptr<FlatUnit>> units) {
  return comm::name_subjects(std::move(text), [&](std::int32_t subject) -> std::string {
    const auto unit = static_cast<std::size_t>(subject);
    return unit < units.size() ? fmt::format("unit '{}'", units[unit]->name()) : "";
  });
}

}  // namespace lockstep::shard

#include <lockstep/comm/communicator.h>

#include <algorithm>
#include <cstring>

#include <lockstep/base/error.h>
#include <lockstep/comm/algorithms/collectives.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/device/backward_thread.h>
#include <lockstep/flight/journal.h>

namespace lockstep::comm {

namespace {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (std::size_t dim = 0; dim < sizes.size(); ++dim)
    text += fmt::format("{}{}", dim == 0 ? "" : ", ", sizes[dim]);
  return text + "]";
}

// The rank that also has to make this call before it can end here, because this rank's outputs
// depend on what that rank gives.
std::int32_t needed_by(const Call& call, int rank) {
  const auto empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  const auto& outputs = call.outputs;
  switch (call.fingerprint.operation) {
    case Operation::barrier: return flight::Record::kEveryone;
    case Operation::all_reduce:
      return std::all_of(outputs.begin(), outputs.end(), empty) ? flight::Record::kNobody
                                                                : flight::Record::kEveryone;
    case Operation::all_gather:
    case Operation::reduce_scatter:
    case Operation::all_to_all:
      return std::any_of(outputs.begin(), outputs.end(), empty) ? flight::Record::kNobody
                                                                : flight::Record::kEveryone;
    case Operation::broadcast:
      return call.fingerprint.root == rank || std::all_of(outputs.begin(), outputs.end(), empty)
                 ? flight::Record::kNobody
                 : call.fingerprint.root;
    case Operation::exchange:
    case Operation::split: break;
  }
  return flight::Record::kNobody;
}

// Checks what every tensor must be, whatever the call.
void check_tensor(const at::Tensor& tensor, const char* what, Operation operation) {
  if (!tensor.defined()) throw UsageError("{}: {} is undefined", name(operation), what);
  if (tensor.layout() != c10::Layout::Strided)
    throw UsageError("{}: {} is sparse; only dense tensors can be communicated: convert it with "
                     "to_dense()",
                     name(operation), what);
  if (!tensor.is_contiguous())
    throw UsageError("{}: {} of shape {} is not contiguous: pass tensor.contiguous() and copy the "
                     "result back where it is written",
                     name(operation), what, shape_text(tensor.sizes()));
  if (tensor.numel() > 0 && !tensor.is_meta() && tensor.data_ptr() == nullptr)
    throw UsageError(
        "{}: {} of shape {} has no memory, as a parameter or gradient that is cut over "
        "ranks: pass this rank's part, or what is put together of all",
        name(operation), what, shape_text(tensor.sizes()));
}

void check_same_device(const at::Tensor& first, const at::Tensor& other, Operation operation) {
  if (first.device() != other.device())
    throw UsageError("{}: the tensors of one call must be on one device, these are on {} and {}",
                     name(operation), first.device().str(), other.device().str());
}

void check_same_kind(const at::Tensor& first, const at::Tensor& other, Operation operation) {
  check_same_device(first, other, operation);
  if (first.scalar_type() != other.scalar_type())
    throw UsageError("{}: the tensors of one call must have one dtype, these have {} and {}",
                     name(operation), c10::toString(first.scalar_type()),
                     c10::toString(other.scalar_type()));
}

void check_reduction(ReduceOp op, DType dtype, Operation operation) {
  const bool floating = dtype == DType::float32 || dtype == DType::float64 ||
                        dtype == DType::float16 || dtype == DType::bfloat16;
  if (op == ReduceOp::mean && !floating)
    throw UsageError("{}: a mean of {} is not defined: convert to a floating dtype, or take the "
                     "sum",
                     name(operation), name(dtype));
}

std::uint64_t total_elements(const std::vector<at::Tensor>& tensors) {
  std::uint64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += static_cast<std::uint64_t>(tensor.numel());
  return count;
}

std::uint16_t count_of(const std::vector<at::Tensor>& tensors) {
  return static_cast<std::uint16_t>(std::min<std::size_t>(tensors.size(), 0xffff));
}

// A hash that differs between lists whose lengths differ although they have equally many elements
// in all; 0 for a single tensor.
std::uint16_t hash_sizes(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return 0;
  std::uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors)
    hash = (hash ^ static_cast<std::uint64_t>(tensor.numel())) * 0x9e3779b97f4a7c15ull + 1;
  return static_cast<std::uint16_t>(hash >> 48 | 1);
}

// An initializer list would copy the tensor.
std::vector<at::Tensor> list_of(at::Tensor tensor) {
  std::vector<at::Tensor> list;
  list.push_back(std::move(tensor));
  return list;
}

constexpr std::size_t kFlightEntries = 256;

// Formats a record when someone reads it, not when it is made.
std::string summarize(const flight::Record& record) {
  Fingerprint fingerprint;
  static_assert(sizeof(record.detail) == sizeof(fingerprint));
  std::memcpy(&fingerprint, record.detail, sizeof(fingerprint));
  return fingerprint.text_with_subject();
}

}  // namespace

bool has_algorithm(Operation operation, Algorithm algorithm) {
  const auto available = algorithms_of(operation);
  return algorithm == Algorithm::automatic ||
         std::find(available.begin(), available.end(), algorithm) != available.end();
}

void check_algorithm(Operation operation, Algorithm algorithm) {
  if (algorithm != Algorithm::automatic) choose_algorithm(operation, algorithm, 0, {});
}

CommError GroupInfo::error(CommError::Details details) const {
  details.group = name;
  details.global_ranks = global_ranks;
  return CommError(std::move(details));
}

Communicator::Communicator(GroupInfo info, milliseconds timeout)
    : info_(std::move(info)),
      timeout_(timeout),
      recorder_(std::make_shared<flight::Recorder>(info_.name, info_.rank, info_.global_ranks,
                                                   &summarize, kFlightEntries, info_.generation)),
      sent_(info_.global_ranks.size(), 0),
      received_(info_.global_ranks.size(), 0) {
  LOCKSTEP_CHECK(info_.rank >= 0 && info_.rank < size(), "rank {} of {}", info_.rank, size());
  if (!info_.journal) info_.journal = std::make_shared<flight::Journal>();
  info_.journal->add(recorder_);
}

Communicator::~Communicator() = default;

Work Communicator::start(Call call, const CallOptions& options, const Where& where) {
  Fingerprint& fingerprint = call.fingerprint;
  // These checks come before the call is numbered: a rank whose call is refused here can go on with
  // the others.
  check_algorithm(fingerprint.operation, options.algorithm);
  if (options.divisor.defined())
    check_divisor(options.divisor, fingerprint.operation, fingerprint.reduce_op,
                  call.outputs.empty() ? c10::Device(c10::kCPU) : call.outputs.front().device());
  fingerprint.generation = info_.generation;
  fingerprint.algorithm = options.algorithm;
  if (options.subject >= 0) {
    LOCKSTEP_CHECK(fingerprint.operation != Operation::broadcast, "a broadcast has no subject");
    fingerprint.root = options.subject;
  }
  // An exchange concerns only the ranks that it names, so it is numbered per pair instead.
  if (fingerprint.operation != Operation::exchange) fingerprint.sequence = ++sequence_;
  call.deadline = Deadline::after(options.timeout.value_or(timeout_));
  call.launch = options.launch;
  call.divisor = options.divisor;

  flight::Record record;
  record.sequence = fingerprint.sequence;
  record.operation = comm::name(fingerprint.operation);
  std::memcpy(record.detail, &fingerprint, sizeof(fingerprint));
  record.file = where.file_name();
  record.line = where.line();
  record.needs = needed_by(call, rank());
  for (std::size_t i = 0; i < call.transfers.size(); ++i) {
    const Transfer& transfer = call.transfers[i];
    const bool sends = transfer.direction == Transfer::Direction::send;
    const std::uint64_t number = call.transfer_sequences[i];
    flight::add_peer(record, transfer.peer, sends || transfer.tensor.numel() == 0 ? 0 : number);
    if (sends) recorder_->note_sent(transfer.peer, number);
  }
  const device::AsBackwardThread caller;
  call.flight_entry = recorder_->record(record);
  return Work(do_start(std::move(call)));
}

void Communicator::check(const at::Tensor& tensor, const char* what, Operation operation) const {
  check_tensor(tensor, what, operation);
  do_check(operation, tensor);
}

void Communicator::check(const std::vector<at::Tensor>& tensors, const char* what,
                         Operation operation) const {
  if (tensors.empty()) throw UsageError("{}: the list of tensors is empty", comm::name(operation));
  for (const at::Tensor& tensor : tensors) {
    check(tensor, what, operation);
    check_same_kind(tensors.front(), tensor, operation);
  }
}

void Communicator::check_one_each(const std::vector<at::Tensor>& tensors, const char* what,
                                  Operation operation) const {
  if (static_cast<int>(tensors.size()) != size())
    throw UsageError("{}: {} tensors given as {}, but the group '{}' has {} ranks: give one for "
                     "each",
                     comm::name(operation), tensors.size(), what, info_.name, size());
  check(tensors, what, operation);
}

void Communicator::check_multiple(const at::Tensor& whole, const at::Tensor& part,
                                  Operation operation) const {
  if (whole.numel() != part.numel() * size())
    throw UsageError("{}: {} × {} ranks elements expected, but the whole has {} (shape {}) and the "
                     "part has {} (shape {})",
                     comm::name(operation), part.numel(), size(), whole.numel(),
                     shape_text(whole.sizes()), part.numel(), shape_text(part.sizes()));
}

Work Communicator::all_reduce(at::Tensor tensor, ReduceOp op, CallOptions options, Where where) {
  return all_reduce(list_of(std::move(tensor)), op, options, where);
}

Work Communicator::all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, CallOptions options,
                              Where where) {
  check(tensors, "tensor", Operation::all_reduce);
  Call call;
  call.fingerprint = {.count = total_elements(tensors),
                      .operation = Operation::all_reduce,
                      .dtype = dtype_of(tensors.front().scalar_type()),
                      .reduce_op = op,
                      .tensors = count_of(tensors),
                      .sizes = hash_sizes(tensors)};
  check_reduction(op, call.fingerprint.dtype, Operation::all_reduce);
  check_overlap(Operation::all_reduce, tensors, {});
  call.outputs = std::move(tensors);
  return start(std::move(call), options, where);
}

Work Communicator::all_gather(at::Tensor output, at::Tensor input, CallOptions options,
                              Where where) {
  check(input, "input", Operation::all_gather);
  check(output, "output", Operation::all_gather);
  check_same_kind(input, output, Operation::all_gather);
  check_multiple(output, input, Operation::all_gather);
  check_part(Operation::all_gather, output, input, rank());
  Call call;
  call.fingerprint = {.count = static_cast<std::uint64_t>(output.numel()),
                      .operation = Operation::all_gather,
                      .dtype = dtype_of(input.scalar_type())};
  call.inputs = list_of(std::move(input));
  call.outputs = list_of(std::move(output));
  return start(std::move(call), options, where);
}

Work Communicator::all_gather(std::vector<at::Tensor> outputs, at::Tensor input,
                              CallOptions options, Where where) {
  check(input, "input", Operation::all_gather);
  check_one_each(outputs, "outputs", Operation::all_gather);
  check_same_kind(input, outputs.front(), Operation::all_gather);
  const at::Tensor& mine = outputs[static_cast<std::size_t>(rank())];
  if (mine.numel() != input.numel())
    throw UsageError("all_gather: input has {} elements, but outputs[{}], which takes it, has {}",
                     input.numel(), rank(), mine.numel());
  check_overlap(Operation::all_gather, outputs, {input},
                SamePlace{.output = static_cast<std::size_t>(rank()), .input = 0});
  Call call;
  call.fingerprint = {.count = total_elements(outputs),
                      .operation = Operation::all_gather,
                      .dtype = dtype_of(input.scalar_type()),
                      .tensors = count_of(outputs),
                      .sizes = hash_sizes(outputs)};
  call.inputs = list_of(std::move(input));
  call.outputs = std::move(outputs);
  return start(std::move(call), options, where);
}

Work Communicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                  CallOptions options, Where where) {
  check(input, "input", Operation::reduce_scatter);
  check(output, "output", Operation::reduce_scatter);
  check_same_kind(input, output, Operation::reduce_scatter);
  check_multiple(input, output, Operation::reduce_scatter);
  check_part(Operation::reduce_scatter, input, output, rank());
  Call call;
  call.fingerprint = {.count = static_cast<std::uint64_t>(input.numel()),
                      .operation = Operation::reduce_scatter,
                      .dtype = dtype_of(input.scalar_type()),
                      .reduce_op = op};
  check_reduction(op, call.fingerprint.dtype, Operation::reduce_scatter);
  call.inputs = list_of(std::move(input));
  call.outputs = list_of(std::move(output));
  return start(std::move(call), options, where);
}

Work Communicator::reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs, ReduceOp op,
                                  CallOptions options, Where where) {
  check(output, "output", Operation::reduce_scatter);
  check_one_each(inputs, "inputs", Operation::reduce_scatter);
  check_same_kind(output, inputs.front(), Operation::reduce_scatter);
  const at::Tensor& mine = inputs[static_cast<std::size_t>(rank())];
  if (mine.numel() != output.numel())
    throw UsageError("reduce_scatter: output has {} elements, but inputs[{}], which goes there, "
                     "has {}",
                     output.numel(), rank(), mine.numel());
  check_overlap(Operation::reduce_scatter, {output}, inputs,
                SamePlace{.output = 0, .input = static_cast<std::size_t>(rank())});
  Call call;
  call.fingerprint = {.count = total_elements(inputs),
                      .operation = Operation::reduce_scatter,
                      .dtype = dtype_of(output.scalar_type()),
                      .reduce_op = op,
                      .tensors = count_of(inputs),
                      .sizes = hash_sizes(inputs)};
  check_reduction(op, call.fingerprint.dtype, Operation::reduce_scatter);
  call.inputs = std::move(inputs);
  call.outputs = list_of(std::move(output));
  return start(std::move(call), options, where);
}

Work Communicator::all_to_all(at::Tensor output, at::Tensor input, CallOptions options,
                              Where where) {
  check(input, "input", Operation::all_to_all);
  check(output, "output", Operation::all_to_all);
  check_same_kind(input, output, Operation::all_to_all);
  if (input.numel() != output.numel() || input.numel() % size() != 0)
    throw UsageError("all_to_all: input ({} elements) and output ({}) must be equally long and "
                     "divide by the {} ranks; give lists of tensors for uneven parts",
                     input.numel(), output.numel(), size());
  check_overlap(Operation::all_to_all, {output}, {input});
  Call call;
  call.fingerprint = {.count = static_cast<std::uint64_t>(input.numel()),
                      .operation = Operation::all_to_all,
                      .dtype = dtype_of(input.scalar_type())};
  call.inputs = list_of(std::move(input));
  call.outputs = list_of(std::move(output));
  return start(std::move(call), options, where);
}

Work Communicator::all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                              CallOptions options, Where where) {
  check_one_each(inputs, "inputs", Operation::all_to_all);
  check_one_each(outputs, "outputs", Operation::all_to_all);
  check_same_kind(inputs.front(), outputs.front(), Operation::all_to_all);
  const auto self = static_cast<std::size_t>(rank());
  if (inputs[self].numel() != outputs[self].numel())
    throw UsageError("all_to_all: inputs[{}] has {} elements and outputs[{}] {}: what a rank keeps "
                     "for itself must be equally long",
                     self, inputs[self].numel(), self, outputs[self].numel());
  check_overlap(Operation::all_to_all, outputs, inputs);
  Call call;
  // Lengths differ from rank to rank, so they are compared message by message, not here.
  call.fingerprint = {.operation = Operation::all_to_all,
                      .dtype = dtype_of(inputs.front().scalar_type()),
                      .tensors = count_of(inputs)};
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  return start(std::move(call), options, where);
}

Work Communicator::broadcast(at::Tensor tensor, int root, CallOptions options, Where where) {
  return broadcast(list_of(std::move(tensor)), root, options, where);
}

Work Communicator::broadcast(std::vector<at::Tensor> tensors, int root, CallOptions options,
                             Where where) {
  check(tensors, "tensor", Operation::broadcast);
  if (root < 0 || root >= size())
    throw UsageError("broadcast: root {} is not a rank of the group '{}' (0 to {})", root,
                     info_.name, size() - 1);
  check_overlap(Operation::broadcast, tensors, {});
  Call call;
  call.fingerprint = {.count = total_elements(tensors),
                      .root = root,
                      .operation = Operation::broadcast,
                      .dtype = dtype_of(tensors.front().scalar_type()),
                      .tensors = count_of(tensors),
                      .sizes = hash_sizes(tensors)};
  call.outputs = std::move(tensors);
  return start(std::move(call), options, where);
}

Work Communicator::exchange(std::vector<Transfer> transfers, CallOptions options, Where where) {
  check_algorithm(Operation::exchange, options.algorithm);
  Call call;
  call.fingerprint = {
      .operation = Operation::exchange,
      .tensors = static_cast<std::uint16_t>(std::min<std::size_t>(transfers.size(), 0xffff))};
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0 || transfer.peer >= size() || transfer.peer == rank())
      throw UsageError("exchange: {} is not another rank of the group '{}' (this is rank {} of {})",
                       transfer.peer, info_.name, rank(), size());
    check(transfer.tensor, "tensor", Operation::exchange);
    check_same_device(transfers.front().tensor, transfer.tensor, Operation::exchange);
    call.fingerprint.dtype = dtype_of(transfer.tensor.scalar_type());
    call.fingerprint.count += static_cast<std::uint64_t>(transfer.tensor.numel());
    const bool sends = transfer.direction == Transfer::Direction::send;
    (sends ? sent : received).push_back(transfer.tensor);
  }
  check_overlap(Operation::exchange, received, sent);
  for (const Transfer& transfer : transfers) {
    const auto peer = static_cast<std::size_t>(transfer.peer);
    auto& counter = transfer.direction == Transfer::Direction::send ? sent_ : received_;
    call.transfer_sequences.push_back(++counter[peer]);
  }
  call.transfers = std::move(transfers);
  return start(std::move(call), options, where);
}

Work Communicator::barrier(CallOptions options, Where where) {
  Call call;
  call.fingerprint = {.operation = Operation::barrier};
  return start(std::move(call), options, where);
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, const std::string& group,
                                                  GroupTensors tensors, Where where) {
  if (group.empty() || group.size() > 128)
    throw UsageError("split: a group's name has 1 to 128 characters, this one has {}",
                     group.size());
  flight::Record record;
  // The all-gather inside the split gets the number. The record of the split has none, or two calls
  // would share it.
  const Fingerprint fingerprint{.sequence = sequence_ + 1, .operation = Operation::split};
  record.operation = comm::name(Operation::split);
  std::memcpy(record.detail, &fingerprint, sizeof(fingerprint));
  record.file = where.file_name();
  record.line = where.line();
  const device::AsBackwardThread caller;
  const auto entry = recorder_->record(record);
  recorder_->mark(entry, flight::State::started);
  try {
    auto result = do_split(
        {.color = color, .key = key, .name = group, .number = ++splits_, .tensors = tensors},
        Deadline::after(timeout_));
    recorder_->mark(entry, flight::State::finished);
    if (result != nullptr) note_open_group(result);
    return result;
  } catch (...) {
    recorder_->mark(entry, flight::State::failed);
    throw;
  }
}

void Communicator::note_refusal(const std::string& reason) const {
  info_.journal->note_refusal(reason);
}

void Communicator::abort(const std::string& reason) { do_abort(reason); }

at::Tensor Communicator::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  dtype_of(dtype);
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const std::int64_t extent : sizes) {
    if (extent < 0) throw UsageError("allocate: a size of {} is negative", extent);
    // Strides are products of sizes, too, also those of an empty tensor.
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(extent, 1), &bytes))
      throw UsageError("allocate: {} of {} are more bytes than can be counted", shape_text(sizes),
                       c10::toString(dtype));
  }
  return do_allocate(sizes, dtype);
}

}  // namespace lockstep::comm

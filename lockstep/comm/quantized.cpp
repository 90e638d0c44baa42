#include <lockstep/comm/quantized.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/codecs/block_quantizer.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/comm/codecs/block_kernels.h>
#endif

namespace lockstep::comm {

namespace {

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void check_messages(const at::Tensor& messages, std::size_t number, std::size_t count,
                    const BlockFormat& format) {
  LOCKSTEP_CHECK(messages.scalar_type() == at::kByte && messages.dim() == 2 &&
                     messages.is_contiguous() &&
                     messages.size(0) == static_cast<std::int64_t>(number) &&
                     messages.size(1) == static_cast<std::int64_t>(encoded_bytes(count, format)),
                 "{} messages of {} numbers", number, count);
  // Scales are floats, so messages must begin at multiples of 4.
  LOCKSTEP_CHECK(reinterpret_cast<std::uintptr_t>(messages.data_ptr()) % 4 == 0);
}

}  // namespace

void check_quantizes_on(c10::Device device) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (device.is_cuda()) return;
#else
  if (device.is_cuda())
    throw UsageError("tensors on {} cannot be quantized by this build of Lockstep, which was made "
                     "for a LibTorch without CUDA: build it with the preset cuda",
                     device.str());
#endif
  if (!device.is_cpu())
    throw UsageError("tensors on {} cannot be quantized: those on the CPU and on CUDA can",
                     device.str());
}

void encode_parts(const BlockFormat& format, const at::Tensor& values, const PartTable& table,
                  const at::Tensor& messages) {
  check_quantizes_on(values.device());
  check_messages(messages, table.num_parts(), table.count, format);
  const DType dtype = dtype_of(values.scalar_type());
#ifdef LOCKSTEP_HAVE_CUDA
  if (values.is_cuda()) {
    const c10::cuda::CUDAGuard on_device(values.device());
    cuda::encode_parts(format, dtype, data_of(values), table, data_of(messages),
                       c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
#endif
  const std::size_t part_bytes = table.count * values.element_size();
  const std::size_t message_bytes = encoded_bytes(table.count, format);
  for (std::size_t message = 0; message < table.num_parts(); ++message)
    encode_blocks(format, dtype, data_of(values) + table.part_of(message) * part_bytes, table.count,
                  data_of(messages) + message * message_bytes);
}

void decode_sums(const BlockFormat& format, const at::Tensor& messages, const SumTable& table,
                 float divisor, const at::Tensor& values) {
  check_quantizes_on(values.device());
  check_messages(messages, table.num_messages(), table.count, format);
  const DType dtype = dtype_of(values.scalar_type());
#ifdef LOCKSTEP_HAVE_CUDA
  if (values.is_cuda()) {
    LOCKSTEP_CHECK(table.terms <= cuda::kMostTerms, "a sum of {} messages", table.terms);
    const c10::cuda::CUDAGuard on_device(values.device());
    cuda::decode_sums(format, dtype, data_of(messages), table, divisor, data_of(values),
                      c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
#endif
  const std::size_t part_bytes = table.count * values.element_size();
  const std::size_t message_bytes = encoded_bytes(table.count, format);
  for (std::size_t part = 0; part < table.parts; ++part)
    decode_sum(format, dtype,
               {.first = data_of(messages) + part * message_bytes,
                .number = table.terms,
                .stride = table.parts * message_bytes},
               table.count, divisor, data_of(values) + part * part_bytes);
}

namespace {

void check_tensor(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined()) throw UsageError("the {} of a quantized collective is undefined", what);
  check_quantizes_on(tensor.device());
  if (!tensor.is_contiguous())
    throw UsageError("the {} of a quantized collective is not contiguous: pass contiguous()", what);
  const auto type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    throw UsageError("the {} of a quantized collective is {}: Float, Half and BFloat16 can be "
                     "quantized",
                     what, c10::toString(type));
}

struct Sides {
  const char* whole_name;
  const at::Tensor& whole;
  const char* part_name;
  const at::Tensor& part;
};

void check_sides(const Sides& sides, int num_ranks) {
  check_tensor(sides.whole, sides.whole_name);
  check_tensor(sides.part, sides.part_name);
  if (sides.whole.device() != sides.part.device())
    throw UsageError("a quantized collective has an {} on {} and an {} on {}: one device is needed",
                     sides.whole_name, sides.whole.device().str(), sides.part_name,
                     sides.part.device().str());
  if (sides.whole.numel() != sides.part.numel() * num_ranks)
    throw UsageError("a quantized collective of {} ranks has an {} of {} elements and an {} of {}: "
                     "{} times {} are needed",
                     num_ranks, sides.whole_name, sides.whole.numel(), sides.part_name,
                     sides.part.numel(), num_ranks, sides.part.numel());
}

at::Tensor take(const TakeMemory& memory, std::int64_t bytes, c10::Device device) {
  if (!memory) return at::empty({bytes}, at::dtype(at::kByte).device(device));
  at::Tensor taken = memory(bytes);
  if (!taken.defined() || taken.numel() != bytes || taken.scalar_type() != at::kByte ||
      taken.device() != device || !taken.is_contiguous() ||
      reinterpret_cast<std::uintptr_t>(taken.data_ptr()) % 4 != 0) {
    const std::string given =
        taken.defined() ? fmt::format("{} {} on {}", taken.numel(),
                                      c10::toString(taken.scalar_type()), taken.device().str())
                        : std::string("none");
    throw UsageError(
        "the memory for a quantized collective's messages is to be a contiguous tensor "
        "of {} Byte on {} that begins at a multiple of 4, and what gives it has given "
        "{}",
        bytes, device.str(), given);
  }
  return taken;
}

// [number, bytes]
at::Tensor take_messages(const TakeMemory& memory, std::int64_t number, std::int64_t count,
                         const BlockFormat& format, c10::Device device) {
  const auto bytes =
      static_cast<std::int64_t>(encoded_bytes(static_cast<std::size_t>(count), format));
  return take(memory, number * bytes, device).view({number, bytes});
}

std::size_t size(std::int64_t number) { return static_cast<std::size_t>(number); }

// A tensor made on one stream is read on another: its memory must not be reused before that is
// done.
void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

}  // namespace

QuantizedGather::QuantizedGather(Communicator& group, at::Tensor output, const at::Tensor& input,
                                 const QuantizedGatherOptions& options, Communicator::Where where)
    : format_(options.format), output_(std::move(output)) {
  check_format(format_);
  check_sides({"output", output_, "input", input}, group.size());
  const c10::NoGradGuard no_grad;
  messages_ = take_messages(options.memory, group.size(), input.numel(), format_, input.device());
  const at::Tensor own = messages_.narrow(0, group.rank(), 1);
  encode_parts(format_, input, {.count = size(input.numel())}, own);
  work_ = group.all_gather(messages_, own, options.call, where);
}

void QuantizedGather::wait() {
  if (!messages_.defined()) return;
  work_.wait();
  const c10::NoGradGuard no_grad;
  const auto parts = messages_.size(0);
  decode_sums(format_, messages_, {.parts = size(parts), .count = size(output_.numel() / parts)}, 1,
              output_);
  keep_for_current_stream(messages_);
  messages_ = at::Tensor();
  output_ = at::Tensor();
}

at::Tensor quantized_and_back(const at::Tensor& input, at::ScalarType output_type,
                              const BlockFormat& format) {
  const c10::NoGradGuard no_grad;
  const at::Tensor output = at::empty(input.sizes(), input.options().dtype(output_type));
  check_format(format);
  check_sides({"output", output, "input", input}, 1);
  const at::Tensor message = take_messages({}, 1, input.numel(), format, input.device());
  encode_parts(format, input, {.count = size(input.numel())}, message);
  decode_sums(format, message, {.count = size(input.numel())}, 1, output);
  return output;
}

NodeGroups split_into_nodes(Communicator& group, int ranks_per_node) {
  if (ranks_per_node < 1 || group.size() % ranks_per_node != 0)
    throw UsageError("the {} ranks of the group '{}' cannot be nodes of {} ranks: give a number "
                     "that divides {}",
                     group.size(), group.name(), ranks_per_node, group.size());
  const int node = group.rank() / ranks_per_node;
  const int place = group.rank() % ranks_per_node;
  return {.inside = group.split(node, place, group.name() + ".inside_node"),
          .across = group.split(place, node, group.name() + ".across_nodes")};
}

QuantizedReduceScatter::QuantizedReduceScatter(Communicator& group, at::Tensor output,
                                               const at::Tensor& input,
                                               const QuantizedReductionOptions& options,
                                               Communicator::Where where)
    : options_(options), where_(where), num_ranks_(group.size()), output_(std::move(output)) {
  start(group, 1, input);
}

QuantizedReduceScatter::QuantizedReduceScatter(const NodeGroups& nodes, at::Tensor output,
                                               const at::Tensor& input,
                                               const QuantizedReductionOptions& options,
                                               Communicator::Where where)
    : options_(options),
      where_(where),
      num_ranks_(nodes.inside->size() * nodes.across->size()),
      output_(std::move(output)) {
  // A hop within a single node, or with one rank in each node, is left out.
  if (nodes.inside->size() > 1 && nodes.across->size() > 1) {
    second_ = nodes.across;
    start(*nodes.inside, nodes.across->size(), input);
  } else {
    start(nodes.inside->size() > 1 ? *nodes.inside : *nodes.across, 1, input);
  }
}

void QuantizedReduceScatter::start(Communicator& first, std::int64_t num_nodes,
                                   const at::Tensor& input) {
  const BlockFormat& format = options_.format;
  check_format(format);
  if (options_.op != ReduceOp::sum && options_.op != ReduceOp::mean)
    throw UsageError("a quantized reduce_scatter with {} was asked for: it has sum and mean",
                     name(options_.op));
  check_sides({"input", input, "output", output_}, num_ranks_);
  if (options_.call.divisor.defined())
    check_divisor(options_.call.divisor, Operation::reduce_scatter, options_.op, output_.device());
  const c10::NoGradGuard no_grad;
  const std::int64_t count = output_.numel();
  sent_ = take_messages(options_.memory, num_ranks_, count, format, input.device());
  received_ = take_messages(options_.memory, num_ranks_, count, format, input.device());
  // Encodes, for each place in the node, the parts for the ranks of that place, node by node.
  encode_parts(format, input,
               {.rows = size(num_nodes), .columns = size(first.size()), .count = size(count)},
               sent_);
  CallOptions call = options_.call;
  call.divisor = at::Tensor();
  work_ = first.all_to_all(received_, sent_, call, where_);
}

void QuantizedReduceScatter::start_second_hop() {
  if (second_ == nullptr) return;
  work_.wait();
  const c10::NoGradGuard no_grad;
  const std::int64_t count = output_.numel();
  const std::int64_t num_nodes = second_->size();
  // [nodes, count]
  const at::Tensor sums =
      take(options_.memory, num_nodes * count * std::int64_t{sizeof(float)}, output_.device())
          .view(at::kFloat);
  decode_sums(
      options_.format, received_,
      {.terms = size(num_ranks_ / num_nodes), .parts = size(num_nodes), .count = size(count)}, 1,
      sums);
  received_ = received_.narrow(0, 0, num_nodes);
  const at::Tensor sent = sent_.narrow(0, 0, num_nodes);
  encode_parts(options_.format, sums, {.columns = size(num_nodes), .count = size(count)}, sent);
  keep_for_current_stream(sums);
  CallOptions call = options_.call;
  call.divisor = at::Tensor();
  work_ = second_->all_to_all(received_, sent, call, where_);
  second_ = nullptr;
}

void QuantizedReduceScatter::wait() {
  if (!received_.defined()) return;
  start_second_hop();
  work_.wait();
  const c10::NoGradGuard no_grad;
  const double divisor = divisor_of(options_.op, options_.call.divisor, num_ranks_);
  decode_sums(options_.format, received_,
              {.terms = size(received_.size(0)), .count = size(output_.numel())},
              static_cast<float>(divisor), output_);
  keep_for_current_stream(received_);
  keep_for_current_stream(sent_);
  sent_ = at::Tensor();
  received_ = at::Tensor();
  output_ = at::Tensor();
}

}  // namespace lockstep::comm

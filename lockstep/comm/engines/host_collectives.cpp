#include <lockstep/comm/engines/host_collectives.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::comm::engines {

namespace {

using Tensors = std::vector<at::Tensor>;

// One tensor over all the bytes: the tensor itself, or a new one with the list's contents.
at::Tensor joined_bytes(const Tensors& tensors) {
  if (tensors.size() == 1) return byte_alias(tensors.front());
  Tensors bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(byte_alias(tensor));
  return at::cat(bytes);
}

// One tensor to receive all the bytes in: the tensor itself, or a new one to be scattered.
at::Tensor landing_bytes(const Tensors& tensors) {
  if (tensors.size() == 1) return byte_alias(tensors.front());
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += static_cast<std::int64_t>(tensor.nbytes());
  return at::empty({total}, at::kByte);
}

void scatter_bytes(const at::Tensor& bytes, const Tensors& tensors) {
  if (tensors.size() == 1) return;
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor target = byte_alias(tensor);
    target.copy_(bytes.narrow(0, at, target.numel()));
    at += target.numel();
  }
}

// How many bytes each rank's part has; a single tensor is cut evenly.
std::vector<std::int64_t> part_bytes(const Tensors& tensors, int num_ranks) {
  std::vector<std::int64_t> parts;
  if (tensors.size() == 1 && num_ranks > 1) {
    parts.assign(static_cast<std::size_t>(num_ranks),
                 static_cast<std::int64_t>(tensors.front().nbytes()) / num_ranks);
    return parts;
  }
  for (const at::Tensor& tensor : tensors)
    parts.push_back(static_cast<std::int64_t>(tensor.nbytes()));
  return parts;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  std::int64_t total = 0;
  for (const std::int64_t value : values) total += value;
  return total;
}

void all_gather(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const at::Tensor input = byte_alias(call.inputs.front());
  const auto parts = part_bytes(call.outputs, num_ranks);
  if (sum(parts) == 0) return;
  const bool even = std::all_of(parts.begin(), parts.end(),
                                [&](std::int64_t part) { return part == parts.front(); });
  if (even && parts.front() <= kLargestPieceBytes) {
    const at::Tensor whole = landing_bytes(call.outputs);
    engine.all_gather(whole, input, call.deadline);
    scatter_bytes(whole, call.outputs);
    return;
  }
  // Parts of any length: every rank's in turn.
  std::int64_t at = 0;
  for (int root = 0; root < num_ranks; ++root) {
    const auto part = static_cast<std::size_t>(root);
    const at::Tensor target = call.outputs.size() == 1
                                  ? byte_alias(call.outputs.front()).narrow(0, at, parts[part])
                                  : byte_alias(call.outputs[part]);
    at += parts[part];
    if (root == group.rank && target.data_ptr() != input.data_ptr()) target.copy_(input);
    if (parts[part] > 0) engine.broadcast(target, root, call.deadline);
  }
}

// Lengths are only known in pairs: what a rank is about to get is asked before it comes, because
// some engines end the process when it does not fit.
void check_lengths(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const auto num_ranks = group.global_ranks.size();
  at::Tensor sent = at::empty({static_cast<std::int64_t>(num_ranks)}, at::kLong);
  at::Tensor expected = at::empty_like(sent);
  for (std::size_t rank = 0; rank < num_ranks; ++rank)
    sent.data_ptr<std::int64_t>()[rank] = call.inputs[rank].numel();
  const std::vector<std::int64_t> eight_each(num_ranks, sizeof(std::int64_t));
  engine.all_to_all(byte_alias(expected), byte_alias(sent), eight_each, eight_each, call.deadline);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t coming = expected.data_ptr<std::int64_t>()[rank];
    const std::int64_t room = call.outputs[rank].numel();
    if (coming == room) continue;
    const int peer = static_cast<int>(rank);
    throw CommError({.fault = Fault::mismatch,
                     .operation = name(call.fingerprint.operation),
                     .group = group.name,
                     .sequence = call.fingerprint.sequence,
                     .ranks = {std::min(peer, group.rank), std::max(peer, group.rank)},
                     .explanation = fmt::format(
                         "in {}, rank {} sends {} elements to rank {}, whose outputs[{}] has {}",
                         call.fingerprint.text(), peer, coming, group.rank, peer, room)});
  }
}

void all_to_all(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const auto output_parts = part_bytes(call.outputs, num_ranks);
  const auto input_parts = part_bytes(call.inputs, num_ranks);
  if (call.inputs.size() > 1)
    check_lengths(engine, call, group);
  else if (sum(input_parts) == 0)
    return;
  const at::Tensor input = joined_bytes(call.inputs);
  const at::Tensor output = landing_bytes(call.outputs);
  engine.all_to_all(output, input, output_parts, input_parts, call.deadline);
  scatter_bytes(output, call.outputs);
}

// Every rank gets all ranks' versions of its part and reduces them itself: as many bytes on the
// wire as any other way, 16-bit numbers travel as such and are still added in float32.
void reduce_scatter(HostEngine& engine, const Call& call, const GroupInfo& group) {
  const int num_ranks = static_cast<int>(group.global_ranks.size());
  const auto input_parts = part_bytes(call.inputs, num_ranks);
  if (sum(input_parts) == 0) return;
  const at::Tensor& mine = call.outputs.front();
  const std::vector<std::int64_t> output_parts(static_cast<std::size_t>(num_ranks),
                                               static_cast<std::int64_t>(mine.nbytes()));
  const at::Tensor parts =
      at::empty({num_ranks, mine.numel()}, at::TensorOptions().dtype(mine.scalar_type()));
  engine.all_to_all(byte_alias(parts), joined_bytes(call.inputs), output_parts, input_parts,
                    call.deadline);
  if (mine.numel() > 0)
    reduce_locally(parts.unbind(0), call.fingerprint.reduce_op, divisor_of(call, num_ranks), mine);
}

void all_reduce(HostEngine& engine, const Call& call, const GroupInfo& group) {
  if (call.fingerprint.count == 0) return;
  const ReduceOp op = call.fingerprint.reduce_op;
  const Carrier carrier = carry(call.outputs, op);
  engine.all_reduce(carrier.tensor, carrier.op, call.deadline);
  restore(carrier, op, divisor_of(call, static_cast<int>(group.global_ranks.size())), call.outputs);
}

// Sums over one rank, and broadcasts from it, leave the tensors as they are.
void run_alone(const Call& call) {
  if (!call.inputs.empty()) {
    const at::Tensor& input = call.inputs.front();
    const at::Tensor& output = call.outputs.front();
    if (input.numel() > 0 && input.data_ptr() != output.data_ptr())
      flat_alias(output).copy_(flat_alias(input));
  }
  const double divisor = divisor_of(call, 1);
  if (divisor == 1) return;
  for (const at::Tensor& tensor : call.outputs)
    reduce_locally({flat_alias(tensor)}, ReduceOp::mean, divisor, tensor);
}

}  // namespace

void run_collective(HostEngine* engine, const Call& call, const GroupInfo& group) {
  if (engine == nullptr) return run_alone(call);
  switch (call.fingerprint.operation) {
    case Operation::all_reduce: return all_reduce(*engine, call, group);
    case Operation::all_gather: return all_gather(*engine, call, group);
    case Operation::reduce_scatter: return reduce_scatter(*engine, call, group);
    case Operation::all_to_all: return all_to_all(*engine, call, group);
    case Operation::broadcast:
      for (const at::Tensor& tensor : call.outputs)
        if (tensor.numel() > 0)
          engine->broadcast(byte_alias(tensor), call.fingerprint.root, call.deadline);
      return;
    case Operation::barrier: return engine->barrier(call.deadline);
    case Operation::exchange:
    case Operation::split: break;
  }
  LOCKSTEP_CHECK(false, "{} is no collective", name(call.fingerprint.operation));
}

}  // namespace lockstep::comm::engines

#include <lockstep/comm/backends/nccl/nccl_library.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/backends/engine/carrier.h>

namespace lockstep::comm::backends {

namespace {

using Tensors = std::vector<at::Tensor>;

ncclDataType_t type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return ncclFloat32;
    case at::kDouble: return ncclFloat64;
    case at::kInt: return ncclInt32;
    case at::kLong: return ncclInt64;
    case at::kByte: return ncclUint8;
    default: break;
  }
  LOCKSTEP_CHECK(false, "a carrier of another type");
  return ncclUint8;
}

ncclRedOp_t nccl_op(BasicOp op) {
  switch (op) {
    case BasicOp::min: return ncclMin;
    case BasicOp::max: return ncclMax;
    case BasicOp::sum: break;
  }
  return ncclSum;
}

bool all_empty(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
}

// NCCL's own sums of these types are used as they are; the others are computed here.
bool is_summed_as_it_is(DType dtype, ReduceOp op) {
  return (op == ReduceOp::sum || op == ReduceOp::mean) &&
         (dtype == DType::float32 || dtype == DType::float64 || dtype == DType::int32 ||
          dtype == DType::int64);
}

// Translates one call into NCCL's functions.
class Enqueuer {
 public:
  Enqueuer(NcclComm& comm, int num_ranks, const c10::cuda::CUDAStream& stream)
      : comm_(comm), num_ranks_(num_ranks), stream_(stream) {}

  void enqueue(const Call& call) {
    const Operation operation = call.fingerprint.operation;
    switch (operation) {
      case Operation::all_reduce:
        if (!all_empty(call.outputs)) all_reduce(call);
        return;
      case Operation::all_gather:
        if (!all_empty(call.outputs)) all_gather(call);
        return;
      case Operation::reduce_scatter:
        if (!all_empty(call.inputs)) reduce_scatter(call);
        return;
      case Operation::all_to_all:
        // Uneven parts may be empty on this rank and not on another.
        if (call.inputs.size() > 1 || !all_empty(call.inputs)) all_to_all(call);
        return;
      case Operation::broadcast: return broadcast(call);
      case Operation::exchange: return exchange(call);
      case Operation::barrier:
      case Operation::split: break;
    }
    LOCKSTEP_CHECK(false, "{} is no call over tensors", comm::name(operation));
  }

 private:
  double divisor(const Call& call) const { return divisor_of(call, num_ranks_); }

  void all_reduce(const Call& call) {
    const ReduceOp op = call.fingerprint.reduce_op;
    if (!is_summed_as_it_is(call.fingerprint.dtype, op)) {
      const Carrier carrier = carry(call.outputs, op);
      reduce_in_place({carrier.tensor}, carrier.op);
      restore(carrier, op, divisor(call), call.outputs);
      return;
    }
    Tensors flat;
    for (const at::Tensor& tensor : call.outputs)
      if (tensor.numel() > 0) flat.push_back(flat_alias(tensor));
    reduce_in_place(flat, BasicOp::sum);
    if (op == ReduceOp::mean) divide(flat, divisor(call));
  }

  // Reduces each tensor in place, all in one call of NCCL.
  void reduce_in_place(const Tensors& tensors, BasicOp op) {
    const NcclComm::Use use(comm_);
    NcclGroupCall group;
    for (const at::Tensor& tensor : tensors)
      nccl_.check(nccl_.all_reduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor),
                                   type_of(tensor), nccl_op(op), use.get(), stream_),
                  "ncclAllReduce");
    group.end();
  }

  static void divide(const Tensors& tensors, double divisor) {
    if (tensors.empty()) return;
    LOCKSTEP_CHECK(at::isFloatingType(tensors.front().scalar_type()), "a mean of integers");
    if (tensors.size() == 1)
      tensors.front().div_(divisor);
    else
      at::_foreach_div_(tensors, divisor);
  }

  void reduce_scatter(const Call& call) {
    const ReduceOp op = call.fingerprint.reduce_op;
    const at::Tensor& output = call.outputs.front();
    if (call.inputs.size() == 1 && is_summed_as_it_is(call.fingerprint.dtype, op)) {
      const at::Tensor to = flat_alias(output);
      {
        const NcclComm::Use use(comm_);
        nccl_.check(nccl_.reduce_scatter(call.inputs.front().data_ptr(), to.data_ptr(), count(to),
                                         type_of(to), ncclSum, use.get(), stream_),
                    "ncclReduceScatter");
      }
      if (op == ReduceOp::mean) divide({to}, divisor(call));
      return;
    }
    // Every rank receives all ranks' versions of its part and reduces them itself, 16-bit numbers
    // in float32.
    const at::Tensor parts = at::empty({num_ranks_, output.numel()}, output.options());
    const Tensors to = parts.unbind(0);
    swap_parts(to, parts_of(call.inputs));
    if (output.numel() > 0) reduce_locally(to, op, divisor(call), output);
  }

  // Returns one tensor for each rank: the list as it is, or equal parts of its only tensor.
  Tensors parts_of(const Tensors& tensors) const {
    if (tensors.size() == 1 && num_ranks_ > 1) return flat_alias(tensors.front()).chunk(num_ranks_);
    Tensors parts;
    for (const at::Tensor& tensor : tensors) parts.push_back(flat_alias(tensor));
    return parts;
  }

  void all_gather(const Call& call) {
    const at::Tensor& from = call.inputs.front();
    const NcclComm::Use use(comm_);
    if (call.outputs.size() == 1) {
      nccl_.check(nccl_.all_gather(from.data_ptr(), call.outputs.front().data_ptr(), from.nbytes(),
                                   ncclUint8, use.get(), stream_),
                  "ncclAllGather");
      return;
    }
    // The parts have different lengths: each rank broadcasts its own to all others.
    NcclGroupCall group;
    for (std::size_t rank = 0; rank < call.outputs.size(); ++rank) {
      const at::Tensor& to = call.outputs[rank];
      if (to.numel() > 0)
        nccl_.check(nccl_.broadcast(from.data_ptr(), to.data_ptr(), to.nbytes(), ncclUint8,
                                    static_cast<int>(rank), use.get(), stream_),
                    "ncclBroadcast");
    }
    group.end();
  }

  void all_to_all(const Call& call) { swap_parts(parts_of(call.outputs), parts_of(call.inputs)); }

  // to[r] ← rank r's from[this rank].
  void swap_parts(const Tensors& to, const Tensors& from) {
    const NcclComm::Use use(comm_);
    NcclGroupCall group;
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      send(from[rank], static_cast<int>(rank), use);
      receive(to[rank], static_cast<int>(rank), use);
    }
    group.end();
  }

  void broadcast(const Call& call) {
    const NcclComm::Use use(comm_);
    NcclGroupCall group;
    for (const at::Tensor& tensor : call.outputs)
      if (tensor.numel() > 0)
        nccl_.check(nccl_.broadcast(tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes(),
                                    ncclUint8, call.fingerprint.root, use.get(), stream_),
                    "ncclBroadcast");
    group.end();
  }

  void exchange(const Call& call) {
    const NcclComm::Use use(comm_);
    NcclGroupCall group;
    for (const Transfer& transfer : call.transfers)
      if (transfer.direction == Transfer::Direction::send)
        send(transfer.tensor, transfer.peer, use);
      else
        receive(transfer.tensor, transfer.peer, use);
    group.end();
  }

  void send(const at::Tensor& tensor, int peer, const NcclComm::Use& use) {
    if (tensor.numel() == 0) return;
    nccl_.check(nccl_.send(tensor.data_ptr(), tensor.nbytes(), ncclUint8, peer, use.get(), stream_),
                "ncclSend");
  }

  void receive(const at::Tensor& tensor, int peer, const NcclComm::Use& use) {
    if (tensor.numel() == 0) return;
    nccl_.check(
        nccl_.receive(tensor.data_ptr(), tensor.nbytes(), ncclUint8, peer, use.get(), stream_),
        "ncclRecv");
  }

  static std::size_t count(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
  }

  const NcclLibrary& nccl_ = NcclLibrary::get();
  NcclComm& comm_;
  const int num_ranks_;
  const c10::cuda::CUDAStream stream_;
};

}  // namespace

void enqueue_collective(NcclComm& comm, const Call& call, int num_ranks,
                        const c10::cuda::CUDAStream& stream) {
  Enqueuer(comm, num_ranks, stream).enqueue(call);
}

}  // namespace lockstep::comm::backends

#include <lockstep/comm/engines/nccl_collectives.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/engines/c10d_reduce_op.h>
#include <lockstep/comm/engines/reduction.h>

namespace lockstep::comm::engines {

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors byte_aliases(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(byte_alias(tensor));
  return result;
}

// A call's way to NCCL.
class Enqueuer {
 public:
  Enqueuer(c10d::Backend& engine, int num_ranks, c10::Device device)
      : engine_(engine), num_ranks_(num_ranks), device_(device) {}

  void enqueue(const Call& call) {
    const auto is_empty = [](const Tensors& tensors) {
      return std::all_of(tensors.begin(), tensors.end(),
                         [](const at::Tensor& tensor) { return tensor.numel() == 0; });
    };
    const Operation operation = call.fingerprint.operation;
    switch (operation) {
      case Operation::all_reduce: {
        if (is_empty(call.outputs)) return;
        const Carrier carrier = carry(call.outputs, call.fingerprint.reduce_op);
        all_reduce(carrier.tensor, carrier.op);
        restore(carrier, call.fingerprint.reduce_op, divisor_of(call, num_ranks_), call.outputs);
        return;
      }
      case Operation::barrier:
        all_reduce(at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_)),
                   BasicOp::sum);
        return;
      case Operation::all_gather:
        if (!is_empty(call.outputs)) all_gather(call);
        return;
      case Operation::reduce_scatter:
        if (!is_empty(call.inputs)) reduce_scatter(call);
        return;
      case Operation::all_to_all:
        // Uneven parts may be empty here and not on another rank.
        if (call.inputs.size() > 1 || !is_empty(call.inputs)) all_to_all(call);
        return;
      case Operation::broadcast: return broadcast(call);
      case Operation::exchange: return exchange(call);
      case Operation::split: break;
    }
    LOCKSTEP_CHECK(false, "{} is no call", comm::name(operation));
  }

  std::vector<NcclWork> works() && { return std::move(works_); }

 private:
  // The current stream goes on when the result is there.
  void order(NcclWork work) {
    work->wait();
    works_.push_back(std::move(work));
  }

  void all_reduce(const at::Tensor& tensor, BasicOp op) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(op);
    Tensors tensors{tensor};
    order(engine_.allreduce(tensors, options));
  }

  void reduce_scatter(const Call& call) {
    const ReduceOp op = call.fingerprint.reduce_op;
    const DType dtype = call.fingerprint.dtype;
    const bool sums = op == ReduceOp::sum || op == ReduceOp::mean;
    const bool native =
        dtype == DType::float32 || dtype == DType::float64
            ? sums
            : dtype == DType::int32 || dtype == DType::int64 || dtype == DType::uint8;
    const at::Tensor& output = call.outputs.front();
    if (native && call.inputs.size() == 1) {
      at::Tensor to = flat_alias(output);
      at::Tensor from = flat_alias(call.inputs.front());
      c10d::ReduceScatterOptions options;
      options.reduceOp = op == ReduceOp::min   ? c10d_op(BasicOp::min)
                         : op == ReduceOp::max ? c10d_op(BasicOp::max)
                                               : c10d_op(BasicOp::sum);
      order(engine_._reduce_scatter_base(to, from, options));
      if (op == ReduceOp::mean) to.div_(divisor_of(call, num_ranks_));
      return;
    }
    // Every rank gets all versions of its part and reduces them itself, 16-bit numbers in float32.
    const at::Tensor parts = at::empty({num_ranks_, output.numel()}, output.options());
    Tensors to = parts.unbind(0);
    Tensors from;
    if (call.inputs.size() == 1)
      from = flat_alias(call.inputs.front()).chunk(num_ranks_);
    else
      for (const at::Tensor& input : call.inputs) from.push_back(flat_alias(input));
    order(engine_.alltoall(to, from));
    if (output.numel() > 0) reduce_locally(to, op, divisor_of(call, num_ranks_), output);
  }

  void all_gather(const Call& call) {
    at::Tensor from = byte_alias(call.inputs.front());
    if (call.outputs.size() == 1) {
      at::Tensor to = byte_alias(call.outputs.front());
      order(engine_._allgather_base(to, from));
      return;
    }
    std::vector<Tensors> to{byte_aliases(call.outputs)};
    Tensors inputs{from};
    order(engine_.allgather(to, inputs));
  }

  void all_to_all(const Call& call) {
    if (call.outputs.size() == 1) {
      at::Tensor to = byte_alias(call.outputs.front());
      at::Tensor from = byte_alias(call.inputs.front());
      std::vector<std::int64_t> even;
      order(engine_.alltoall_base(to, from, even, even));
      return;
    }
    Tensors to = byte_aliases(call.outputs);
    Tensors from = byte_aliases(call.inputs);
    order(engine_.alltoall(to, from));
  }

  void broadcast(const Call& call) {
    c10d::BroadcastOptions options;
    options.rootRank = call.fingerprint.root;
    for (const at::Tensor& tensor : call.outputs) {
      if (tensor.numel() == 0) continue;
      Tensors bytes{byte_alias(tensor)};
      order(engine_.broadcast(bytes, options));
    }
  }

  void exchange(const Call& call) {
    std::vector<const Transfer*> transfers;
    for (const Transfer& transfer : call.transfers)
      if (transfer.tensor.numel() > 0) transfers.push_back(&transfer);
    if (transfers.empty()) return;
    engine_.startCoalescing();
    for (const Transfer* transfer : transfers) {
      Tensors bytes{byte_alias(transfer->tensor)};
      if (transfer->direction == Transfer::Direction::send)
        engine_.send(bytes, transfer->peer, 0);
      else
        engine_.recv(bytes, transfer->peer, 0);
    }
    order(engine_.endCoalescing());
  }

  c10d::Backend& engine_;
  const int num_ranks_;
  const c10::Device device_;
  std::vector<NcclWork> works_;
};

}  // namespace

std::vector<NcclWork> enqueue_collective(c10d::Backend& engine, const Call& call, int num_ranks,
                                         c10::Device device) {
  Enqueuer enqueuer(engine, num_ranks, device);
  enqueuer.enqueue(call);
  return std::move(enqueuer).works();
}

}  // namespace lockstep::comm::engines

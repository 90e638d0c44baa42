#include "collective.h"

#include <cstring>

#include <lockstep/base/hash.h>

namespace lockstep::comm::faults {

namespace {

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

// Bytes that make sense as any dtype: small whole float32 numbers for operations that add.
std::vector<std::byte> data_of(std::size_t bytes, int rank, int round) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i + sizeof(float) <= bytes; i += sizeof(float)) {
    const auto value = static_cast<float>((i * 31 + index(rank) * 7 + index(round)) % 1013);
    std::memcpy(data.data() + i, &value, sizeof(value));
  }
  return data;
}

std::vector<Bytes> cut(std::vector<std::byte>& data, int parts) {
  std::vector<Bytes> spans;
  const std::size_t size = data.size() / index(parts);
  for (std::size_t part = 0; part < index(parts); ++part)
    spans.push_back(Bytes(data).subspan(part * size, size));
  return spans;
}

// A ring of one message in each direction.
void exchange(Rank& rank, const Fingerprint& call, std::vector<std::byte>& in, Bytes out) {
  const int n = rank.size();
  Transport& transport = rank.transport();
  const int next = (rank.rank() + 1) % n;
  const int previous = (rank.rank() + n - 1) % n;
  transport.post_send(next, call, out);
  transport.post_receive(previous, call, in);
  transport.end();
}

}  // namespace

std::string Collective::name() const {
  return fmt::format("{} {} {}", comm::name(operation), comm::name(algorithm), count);
}

std::vector<Collective> every_collective() {
  std::vector<Collective> all;
  for (const Operation operation :
       {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather,
        Operation::all_to_all, Operation::broadcast, Operation::exchange})
    for (const Algorithm algorithm : algorithms_of(operation))
      for (const std::size_t count : {1000u, 600'000u})
        all.push_back({operation, algorithm, count});
  all.push_back({Operation::barrier, Algorithm::direct, 0});
  return all;
}

std::uint32_t run(Rank& rank, const Collective& collective, int round, milliseconds timeout) {
  const std::size_t bytes = collective.count * sizeof(float);
  const int n = rank.size();
  std::vector<std::byte> mine = data_of(bytes, rank.rank(), round);
  std::vector<std::byte> whole = data_of(bytes * index(n), rank.rank(), round);
  const auto parts = cut(whole, n);
  const std::vector<ConstBytes> inputs(parts.begin(), parts.end());
  std::vector<std::byte> gathered(whole.size());
  const auto outputs = cut(gathered, n);
  const Reduction sum{DType::float32, ReduceOp::sum};
  Fingerprint call{.count = collective.count,
                   .root = collective.operation == Operation::broadcast ? round % n : -1,
                   .operation = collective.operation,
                   .dtype = DType::float32,
                   .algorithm = collective.algorithm};
  Transport& transport = rank.transport();
  rank.begin(call, timeout);
  switch (collective.operation) {
    case Operation::all_reduce:
      comm::all_reduce(transport, collective.algorithm, sum, mine);
      return crc32c(mine);
    case Operation::reduce_scatter:
      comm::reduce_scatter(transport, collective.algorithm, sum, mine, inputs);
      return crc32c(mine);
    case Operation::all_gather:
      comm::all_gather(transport, collective.algorithm, outputs, mine);
      return crc32c(gathered);
    case Operation::all_to_all:
      comm::all_to_all(transport, outputs, inputs);
      return crc32c(gathered);
    case Operation::broadcast:
      comm::broadcast(transport, collective.algorithm, mine, call.root);
      return crc32c(mine);
    case Operation::exchange: {
      std::vector<std::byte> in(bytes);
      call.sequence = index(round) + 1;
      exchange(rank, call, in, mine);
      return crc32c(in);
    }
    default: comm::barrier(transport); return 0;
  }
}

void run(Rank& rank, const Fingerprint& call, milliseconds timeout) {
  const std::size_t bytes = call.count * size_of(call.dtype);
  const int n = rank.size();
  std::vector<std::byte> mine = data_of(bytes, rank.rank(), 0);
  std::vector<std::byte> whole(bytes * index(n));
  std::vector<std::byte> gathered(whole.size());
  const auto parts = cut(whole, n);
  const std::vector<ConstBytes> inputs(parts.begin(), parts.end());
  const auto outputs = cut(gathered, n);
  const Reduction reduction{call.dtype, call.reduce_op};
  Transport& transport = rank.transport();
  rank.begin(call, timeout);
  const Algorithm algorithm =
      choose_algorithm(call.operation, call.algorithm, bytes, transport.topology());
  switch (call.operation) {
    case Operation::all_reduce: return comm::all_reduce(transport, algorithm, reduction, mine);
    case Operation::reduce_scatter:
      return comm::reduce_scatter(transport, algorithm, reduction, mine, inputs);
    case Operation::all_gather: return comm::all_gather(transport, algorithm, outputs, mine);
    case Operation::all_to_all: return comm::all_to_all(transport, outputs, inputs);
    case Operation::broadcast: return comm::broadcast(transport, algorithm, mine, call.root);
    case Operation::exchange: {
      std::vector<std::byte> in(bytes);
      return exchange(rank, call, in, mine);
    }
    default: return comm::barrier(transport);
  }
}

}  // namespace lockstep::comm::faults

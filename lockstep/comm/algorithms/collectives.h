// The collectives, over any transport. Each runs inside one Transport::begin/end, blocks until this
// rank's part is posted or done, and adds in the order of reduction.h.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include <lockstep/comm/algorithms/reduction.h>
#include <lockstep/comm/transport/transport.h>

namespace lockstep::comm {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// A rank's place in the lists below.
inline std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

// Copies a rank's own part from input to output; does nothing where both are the same memory.
inline void copy_own(Bytes to, ConstBytes from) {
  if (to.data() != from.data() && !from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

// The algorithms that an operation has; automatic falls back to the first.
std::span<const Algorithm> algorithms_of(Operation operation);

// Turns `automatic` into an algorithm that suits the size and the topology, and checks any other:
// UsageError, with the choices, if the operation has no such algorithm.
Algorithm choose_algorithm(Operation operation, Algorithm wanted, std::size_t bytes,
                           const Topology& topology);

// data ← reduction over all ranks, in place.
void all_reduce(Transport& transport, Algorithm algorithm, const Reduction& reduction, Bytes data);

// output ← reduction of all ranks' inputs[own rank].
void reduce_scatter(Transport& transport, Algorithm algorithm, const Reduction& reduction,
                    Bytes output, std::span<const ConstBytes> inputs);

// outputs[r] ← rank r's input. outputs[own rank] may be the input itself.
void all_gather(Transport& transport, Algorithm algorithm, std::span<const Bytes> outputs,
                ConstBytes input);

// outputs[r] ← rank r's inputs[own rank].
void all_to_all(Transport& transport, std::span<const Bytes> outputs,
                std::span<const ConstBytes> inputs);

void broadcast(Transport& transport, Algorithm algorithm, Bytes data, int root);

void barrier(Transport& transport);

}  // namespace lockstep::comm

// Every rank to every rank at once: the owner of a part gets it from everyone, combines it by the
// tree, and gives the result to everyone.
#pragma once

#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm::direct {

// How the finished parts travel.
enum class Gather { everyone, around_the_ring };

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data, Gather gather);
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs);
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void all_gather_ring(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void all_to_all(Transport& transport, std::span<const Bytes> outputs,
                std::span<const ConstBytes> inputs);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace lockstep::comm::direct

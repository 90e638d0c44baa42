// Inside each host first, then across: bytes cross the slow network once for each host instead of
// once for each rank. A host combines only whole nodes of the reduction tree and passes those on,
// so the order stays the same however the ranks are spread.
#pragma once

#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm::hierarchical {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs);
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace lockstep::comm::hierarchical

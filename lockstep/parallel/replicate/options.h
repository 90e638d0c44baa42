// The options of data parallelism (DDP), and how gradients are put into buckets.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::comm {
class Communicator;
}

namespace lockstep::replicate {

// The size of a gradient.
struct GradientSize {
  std::size_t bytes = 0;
  int kind = 0;  // gradients of different kinds (dtype, device) cannot share a bucket
};

struct BucketLimits {
  // The first bucket is small, so that communication starts early in backward.
  std::size_t first_bytes = std::size_t{1} << 20;
  std::size_t bytes = std::size_t{25} << 20;
};

// Puts gradients, in the order in which they become ready, into buckets. A bucket holds no more
// than the limit unless one gradient alone is larger. Buckets are listed in the order in which they
// are complete, the gradients of each in the given order.
std::vector<std::vector<std::size_t>> plan_buckets(std::span<const GradientSize> gradients,
                                                   std::span<const std::size_t> order,
                                                   const BucketLimits& limits);

// Gradients that are exchanged together.
struct GradientBucket {
  std::size_t index = 0;                // in the order of exchange, from 0
  at::Tensor flat;                      // all of them, one after the other
  std::vector<std::string> parameters;  // their names, in that order
  std::vector<at::Tensor> gradients;    // views of `flat`, in the parameters' shapes
};

// Replaces the exchange of a bucket, for example by one that compresses. It starts the exchange and
// returns a function that completes it, after which `flat` must hold the sum of all ranks'
// gradients. Both are called for the same buckets in the same order on every rank, within
// backward(). A hook after which ranks have different sums (local SGD) needs
// consistency_check_interval = 0.
using CommHook =
    std::function<std::function<void()>(GradientBucket& bucket, comm::Communicator& group)>;

struct Options {
  BucketLimits buckets = {};
  // Decides about a parameter that gets no gradient in a backward pass. If true, it counts as
  // unused, and if no rank used it, it keeps its gradient (or none) as in one process; this costs
  // one small message a step, and no walk over the graph. If false, it is an error that names the
  // parameter.
  bool find_unused_parameters = true;
  // Whether buffers, such as running statistics, are broadcast from rank 0 after each backward
  // pass.
  bool broadcast_buffers = true;
  // Empty: all-reduce.
  CommHook comm_hook = {};
};

}  // namespace lockstep::replicate

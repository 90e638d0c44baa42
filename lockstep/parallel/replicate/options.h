// What a user may choose about data parallelism.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/replicate/bucket_plan.h>

namespace lockstep::replicate {

// Gradients that are exchanged together.
struct GradientBucket {
  std::size_t index = 0;                // in the order of exchange, from 0
  at::Tensor flat;                      // all of them, one after the other
  std::vector<std::string> parameters;  // whose they are, in that order
  std::vector<at::Tensor> gradients;    // views of `flat`, in the parameters' shapes
};

// Replaces the exchange of a bucket, for example by one that compresses. It starts the exchange and
// returns what completes it; after that `flat` must hold the sum of all ranks' gradients. Both are
// called for the same buckets in the same order on every rank, from within backward(). One that
// leaves ranks with different sums (local SGD) needs consistency_check_interval = 0.
using CommHook =
    std::function<std::function<void()>(GradientBucket& bucket, comm::Communicator& group)>;

struct Options {
  BucketLimits buckets = {};
  // A parameter that got no gradient in a backward pass: with this on it counts as unused, and
  // keeps its gradient (or none) where no rank used it, as in one process; this costs one small
  // message a step and no walk over the graph. Off, it is an error that names it.
  bool find_unused_parameters = true;
  // Makes buffers (running statistics and the like) those of rank 0 after each backward pass.
  bool broadcast_buffers = true;
  // Empty: all-reduce.
  CommHook comm_hook = {};
};

}  // namespace lockstep::replicate

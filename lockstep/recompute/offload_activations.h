// Activations that wait for backward in the host's memory.
#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/intercept/backward.h>

namespace lockstep {

struct OffloadOptions {
  std::size_t min_bytes = 1 << 20;  // smaller tensors stay: a copy costs more than it frees
};

// While it lives, what operators on this thread save for backward on a GPU is copied to pinned
// memory of the host, and back when backward asks for it; the bits are those of a run without. On a
// CPU there is nothing to move, and nothing is copied. Parameters, small tensors and small parts of
// large ones stay where they are. Tensors that share memory are copied once.
//
//   const lockstep::OffloadActivations offload;
//   auto loss = model->forward(batch);
//
// Around recompute() it is the function's inputs that wait on the host; in a function that is
// recomputed, what operators there save is offloaded and not computed again.
//
// Copies stand in the streams that compute, which wait for them. Threading: belongs to the thread
// it was made on. Failure: UsageError out of backward() where a saved tensor that stayed was
// changed in place.
class OffloadActivations {
 public:
  explicit OffloadActivations(const OffloadOptions& options = {});
  ~OffloadActivations();
  OffloadActivations(const OffloadActivations&) = delete;
  OffloadActivations& operator=(const OffloadActivations&) = delete;

 private:
  class Hooks;

  std::unique_ptr<Hooks> hooks_;
  intercept::HookScope scope_;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::OffloadActivations;
using lockstep::OffloadOptions;

}  // namespace lockstep::names

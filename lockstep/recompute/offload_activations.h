// Keeps activations in the host's memory until backward needs them.
#pragma once

#include <cstddef>
#include <memory>

#include <lockstep/intercept/backward.h>

namespace lockstep {

struct OffloadOptions {
  std::size_t min_bytes = 1 << 20;  // smaller tensors stay: copying costs more than it saves
};

// While it lives, tensors on a GPU that operators on this thread save for backward are copied to
// pinned memory of the host, and back when backward asks for them; bits are the same as without. On
// a CPU nothing is copied. Parameters, small tensors and small parts of large ones stay where they
// are. Tensors that share memory are copied once.
//
//   const lockstep::OffloadActivations offload;
//   auto loss = model->forward(batch);
//
// Around recompute(), the function's inputs are offloaded. Inside a function that is recomputed,
// the tensors saved there are offloaded and not computed again.
//
// Copies run in the streams that compute, which wait for them. Threading: belongs to the thread on
// which it was made. Failure: backward() throws UsageError if a saved tensor that was not offloaded
// was changed in place.
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

// Ranks that stay when another one is lost.
//
//   int main() {
//     const auto copies = std::make_shared<PeerCopies>();   // what is to outlive a failure
//     keep_going([&] {
//       auto dist = setup_distributed({.mode = ParallelMode::FSDP});
//       …  build, load, train …
//     });
//   }
#pragma once

#include <functional>

namespace lockstep {

// Runs `body`, and where the launcher (`lockstep run --max-restarts N`) forms the job anew because
// a rank or a node was lost or nodes came, runs it again in this process, which is then a rank of
// the next generation: perhaps with another rank, among other ranks. Whatever `body` makes it must
// also give up when it is left, by an exception or a return; above all its groups, which cannot be
// used any more. What is to be kept stays outside of it.
//
// When a rank is lost, every call that waits for it throws, and so do all later ones, on all ranks;
// the exception is caught here. Exceptions that have nothing to do with that leave keep_going(),
// and what a `body` does that is not left within some seconds (`lockstep run --leave-within`) is
// ended with its process, and started anew. Without such a launcher it only calls `body`.
//
// Not to be nested; of one thread.
void keep_going(const std::function<void()>& body);

// Whether the launcher wants to form the job anew without haste: a program that looks at this
// between two steps can save what it has and return from its body. For all ranks to agree on.
bool asked_to_leave();

}  // namespace lockstep

namespace lockstep::names {

using lockstep::asked_to_leave;
using lockstep::keep_going;

}  // namespace lockstep::names

// What the libraries below LibTorch have to be told before they are loaded.
#pragma once

#include <utility>
#include <vector>

namespace lockstep {

// Variables that a process which computes should be started with, unless its user has set them:
//
// - OPENBLAS_CORETYPE: an OpenBLAS that is older than the CPU takes it for one with SSE3. Debian
// 12's
//   computes on Xeons of 2023, which have AVX-512, at a fifth of their speed.
// - GOMP_SPINCOUNT, unless OMP_WAIT_POLICY says how to wait: GNU's OpenMP threads spin for
//   milliseconds between two loops, and where other processes want the cores too, that takes them
//   from the very thread that is waited for. With one thread a core, a small GPT trained on two
//   busy cores at 2.7 thousand tokens a second; so at 16 to 24, and with threads that sleep at once
//   (OMP_WAIT_POLICY=passive) at 22 to 28. On idle cores, where those that sleep at once lost up to
//   three quarters (8 threads, tiny matrices), these lost at most a fifth.
// - UCX_DEBUG_SIGNO: UCX, which comes with newer Open MPIs, takes SIGHUP for itself when it is
//   loaded, also where nohup had it ignored.
std::vector<std::pair<const char*, const char*>> computing_environment();

}  // namespace lockstep

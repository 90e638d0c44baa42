// What the libraries below LibTorch have to be told before they are loaded.
#pragma once

#include <utility>
#include <vector>

namespace lockstep {

// Variables that a process which computes should be started with, unless its user has set them:
//
// - OPENBLAS_CORETYPE: an OpenBLAS does not know CPUs newer than itself, and then computes with
// SSE3
//   on a CPU with AVX-512. Debian 12's does on Xeons of 2023, at a fifth of their speed.
// - GOMP_SPINCOUNT, unless OMP_WAIT_POLICY says how to wait: GNU's OpenMP threads spin for
//   milliseconds between two loops, and where other processes want the cores too, that takes them
//   from the very thread that is waited for. With one thread a core, a small GPT trained on two
//   busy cores at 2.7 thousand tokens a second; so at 16 to 24, and with threads that sleep at once
//   (OMP_WAIT_POLICY=passive) at 22 to 28. On idle cores, where those that sleep at once lost up to
//   three quarters (8 threads, tiny matrices), these were as fast as those that spin, or nearly so.
std::vector<std::pair<const char*, const char*>> computing_environment();

}  // namespace lockstep

// What the BLAS below LibTorch has to be told about the CPU.
#pragma once

namespace lockstep {

// The kernels that OpenBLAS should use here, for its variable OPENBLAS_CORETYPE; null where it can
// be left to itself. An OpenBLAS does not know CPUs newer than itself, and then computes with
// SSE3 on a CPU with AVX-512: Debian 12's does on Xeons of 2023, at a fifth of their speed.
const char* openblas_core();

}  // namespace lockstep

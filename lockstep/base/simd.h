// How loops become vector code on every CPU, from one source: the compiler makes a version of the
// function for each instruction set, and the right one is chosen when the program starts.
//
//   LOCKSTEP_SIMD void scale(float* values, std::size_t count, float factor) { … a plain loop … }
//
// Every version computes the same bits: nothing is fused (-ffp-contract=off), and a sum is only
// taken in several lanes where the source spells them out. Compile the file with -O3.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define LOCKSTEP_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LOCKSTEP_SIMD
#endif

// Several tensors in one launch: a table of them goes along as the kernel's argument, and each
// thread block finds the piece of memory that is its own.
#pragma once

#include <cstddef>
#include <cstdint>

// Keeps an argument where it is, in place of a copy for each thread that looks things up in it.
// Older compilers and devices do without the word.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700 && CUDART_VERSION >= 11070
#define LOCKSTEP_GRID_CONSTANT __grid_constant__
#else
#define LOCKSTEP_GRID_CONSTANT
#endif

namespace lockstep::optim::cuda {

// Arguments of a kernel have 4 KiB.
constexpr std::size_t kTableBytes = 3584;

// `Tensor` has a member `count`, of elements; a piece has kPiece of them.
template <typename Tensor, std::int64_t kPiece>
struct TensorTable {
  static constexpr int kMost = static_cast<int>(kTableBytes / (sizeof(Tensor) + sizeof(unsigned)));

  Tensor tensors[kMost];
  unsigned first_piece[kMost + 1];  // of each, and how many there are
  int size = 0;

  struct Piece {
    const Tensor& tensor;
    std::int64_t begin;
    std::int64_t count;
  };
  // Of the thread block.
  __device__ Piece piece() const {
    int low = 0, high = size;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_piece[middle] <= blockIdx.x ? low : high) = middle;
    }
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x - first_piece[low]) * kPiece;
    const std::int64_t left = tensors[low].count - begin;
    return {tensors[low], begin, left < kPiece ? left : kPiece};
  }
};

// Calls launch(table, number of thread blocks) with all tensors, as few times as their number and
// the largest grid allow.
template <std::int64_t kPiece, typename Tensor, typename Launch>
void for_tables(const Tensor* tensors, std::size_t size, const Launch& launch) {
  constexpr std::int64_t kMostPieces = 0x7fffffff;
  TensorTable<Tensor, kPiece> table;
  std::int64_t pieces = 0;
  const auto flush = [&] {
    if (pieces > 0) launch(table, static_cast<unsigned>(pieces));
    table.size = 0;
    pieces = 0;
  };
  for (std::size_t i = 0; i < size; ++i) {
    const std::int64_t more = (tensors[i].count + kPiece - 1) / kPiece;
    if (more == 0) continue;
    if (table.size == table.kMost || pieces + more > kMostPieces) flush();
    table.tensors[table.size] = tensors[i];
    table.first_piece[table.size] = static_cast<unsigned>(pieces);
    pieces += more;
    table.first_piece[++table.size] = static_cast<unsigned>(pieces);
  }
  flush();
}

}  // namespace lockstep::optim::cuda

// Memory that CUDA kernels move in packs of 16 bytes.
#pragma once

#include <cstdint>

namespace lockstep::packs {

template <typename T>
constexpr int kPack = 16 / sizeof(T);

// 16 bytes, moved at once.
template <typename T>
struct alignas(16) Pack {
  T values[kPack<T>];
};

template <typename T>
__device__ Pack<T> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T>*>(from);
}

template <typename T>
__device__ void store_pack(const Pack<T>& pack, T* to) {
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

// Whether memory at all of these addresses can be moved in packs: they are multiples of 16 bytes.
template <typename... Pointers>
__device__ bool in_packs(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace lockstep::packs

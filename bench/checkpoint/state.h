// The state that the programs here save and load: the tensors of a GPT and of its AdamW, float32,
// cut among the ranks. pytorch.py has the same names and shapes.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep::bench {

struct GptSize {
  std::int64_t width = 512;
  std::int64_t layers = 8;
  std::int64_t vocabulary = 16384;
  std::int64_t positions = 1024;
};

using Shape = std::vector<std::int64_t>;

inline std::vector<std::pair<std::string, Shape>> gpt_parameters(const GptSize& size) {
  const std::int64_t width = size.width;
  std::vector<std::pair<std::string, Shape>> all = {{"wte.weight", {size.vocabulary, width}},
                                                    {"wpe.weight", {size.positions, width}}};
  const auto add = [&](const std::string& name, const Shape& weight) {
    all.emplace_back(name + ".weight", weight);
    all.emplace_back(name + ".bias", Shape{weight.back()});
  };
  for (std::int64_t layer = 0; layer < size.layers; ++layer) {
    const std::string block = "h." + std::to_string(layer) + ".";
    add(block + "ln_1", {width});
    add(block + "attn.c_attn", {width, 3 * width});
    add(block + "attn.c_proj", {width, width});
    add(block + "ln_2", {width});
    add(block + "mlp.c_fc", {width, 4 * width});
    add(block + "mlp.c_proj", {4 * width, width});
  }
  add("ln_f", {width});
  return all;
}

// A rank's part of all tensors. Numbers differ between parts, because some disks store equal blocks
// once. All pages of the memory have been written.
inline std::vector<mesh::HeldTensor> gpt_state(const GptSize& size, int rank, int ranks) {
  std::vector<mesh::HeldTensor> all;
  at::manual_seed(static_cast<std::uint64_t>(1 + rank));
  for (const char* const kind : {"model/", "optimizer/exp_avg.", "optimizer/exp_avg_sq."})
    for (const auto& [name, shape] : gpt_parameters(size)) {
      const auto part = mesh::Placement::full(shape).cut_flat(rank, ranks);
      all.push_back({kind + name, at::rand({part.elements()}), shape, part});
    }
  return all;
}

inline std::uint64_t bytes_of(const std::vector<mesh::HeldTensor>& tensors) {
  std::uint64_t bytes = 0;
  for (const mesh::HeldTensor& tensor : tensors) bytes += tensor.values.nbytes();
  return bytes;
}

}  // namespace lockstep::bench

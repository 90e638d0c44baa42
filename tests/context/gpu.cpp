#include "against_whole.h"

namespace lockstep::nn {

// All ranks use the same GPU, because there may be only one.
void check_context_gpu(ranks::Cells& cells) {
  const auto on_gpu = [](at::ScalarType type) {
    return at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(type);
  };
  struct Precision {
    at::ScalarType type;
    double tolerance;
  };
  for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all})
    for (const auto split : {SplitKind::contiguous, SplitKind::zigzag})
      for (const bool causal : {true, false})
        for (const auto& [type, tolerance] :
             {Precision{at::kDouble, 1e-10}, Precision{at::kFloat, 1e-4},
              Precision{at::kBFloat16, 0.03}, Precision{at::kHalf, 0.004}})
          cells.cell(fmt::format("GPU, {} {}{} {}", name(algorithm), name(split),
                                 causal ? " causal" : "", c10::toString(type)),
                     [&] {
                       check_against_whole(
                           cells, {.batch = 2, .kv_heads = 4, .length = 768, .head_dim = 64},
                           {.causal = causal, .algorithm = algorithm, .split = split}, on_gpu(type),
                           tolerance);
                     });
}

}  // namespace lockstep::nn

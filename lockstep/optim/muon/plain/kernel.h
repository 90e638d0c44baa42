// The element-wise stages of a step of Muon, before and after the matrix is used as a whole. Each
// element is computed by itself, with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

namespace lockstep::optim {

// The numbers of one step, the same for every element.
template <typename T>
struct MuonStep {
  T momentum;
  T one_minus_momentum;  // taken before rounding to T
  bool nesterov;
};

// Brings the momentum up to date and writes what is to be orthogonalised. The ranges, of `count`
// elements each, do not overlap.
void muon_push(const MuonStep<float>& step, std::int64_t count, const float* gradient,
               float* momentum, float* push);
void muon_push(const MuonStep<double>& step, std::int64_t count, const double* gradient,
               double* momentum, double* push);

// weight ← keep · weight - rate · direction.
void muon_move(float keep, float rate, std::int64_t count, const float* direction, float* weight);
void muon_move(double keep, double rate, std::int64_t count, const double* direction,
               double* weight);

}  // namespace lockstep::optim

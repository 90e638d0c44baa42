// Where each action of a schedule stands in its rank's list.
#pragma once

#include <array>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// Positions count from 0; kNowhere for what the schedule does not have.
class ActionPositions {
 public:
  static constexpr int kNowhere = -1;

  ActionPositions(int num_stages, int num_micro_batches)
      : num_micro_batches_(static_cast<std::size_t>(num_micro_batches)),
        positions_(static_cast<std::size_t>(num_stages) * num_micro_batches_, kNone) {}

  int& operator[](const Action& action) { return positions_[index(action)][kind(action)]; }
  int operator[](const Action& action) const { return positions_[index(action)][kind(action)]; }

  // The one that gives the stage's input its gradient: the whole backward or the input's.
  Action input_backward(int stage, int micro_batch) const {
    const Action whole = {ActionKind::backward, stage, micro_batch};
    return (*this)[whole] != kNowhere ? whole
                                      : Action{ActionKind::backward_input, stage, micro_batch};
  }

 private:
  using OfKinds = std::array<int, kNumActionKinds>;
  static constexpr OfKinds kNone = {kNowhere, kNowhere, kNowhere, kNowhere,
                                    kNowhere, kNowhere, kNowhere, kNowhere};

  static std::size_t kind(const Action& action) { return static_cast<std::size_t>(action.kind); }
  std::size_t index(const Action& action) const {
    return static_cast<std::size_t>(action.stage) * num_micro_batches_ +
           static_cast<std::size_t>(action.micro_batch);
  }

  std::size_t num_micro_batches_;
  std::vector<OfKinds> positions_;
};

}  // namespace lockstep::pipeline

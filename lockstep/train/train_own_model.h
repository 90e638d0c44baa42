// `lockstep train` of a model of one's own, as one of the job's ranks.
#pragma once

#include <memory>

#include <lockstep/train/config/config.h>
#include <lockstep/train/options.h>

namespace lockstep {
class PeerCopies;
}

namespace lockstep::train {

// Loads the library that model.library names, and trains its model as the config says. The
// arguments and errors are those of train_language_model().
TrainingResult train_own_model(const TrainConfig& config, int output_fd,
                               std::shared_ptr<PeerCopies> peer_copies);

}  // namespace lockstep::train

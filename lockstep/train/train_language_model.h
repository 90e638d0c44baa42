// `lockstep train` as functions: trains a language model, or a model of one's own, as a config
// says.
#pragma once

#include <memory>

#include <lockstep/train/config/config.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

// Every rank of a job calls it. The main rank prints to `output_fd`. `peer_copies` holds the copies
// of checkpoint.memory_interval, as in TrainerOptions.
TrainingResult train_language_model(const TrainConfig& config, int output_fd,
                                    std::shared_ptr<PeerCopies> peer_copies);

// The same of the model that the library of model.library has under model.name.
TrainingResult train_own_model(const TrainConfig& config, int output_fd,
                               std::shared_ptr<PeerCopies> peer_copies);

}  // namespace lockstep::train

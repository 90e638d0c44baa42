// `lockstep train` as a function: a language model, trained as a config says.
#pragma once

#include <memory>

#include <lockstep/train/config/config.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

// Every rank of a job calls it. What is worth saying goes to `output_fd`, on the main rank.
// `peer_copies` is for what checkpoint.memory_interval asks for, as in TrainerOptions.
TrainingResult train_language_model(const TrainConfig& config, int output_fd,
                                    std::shared_ptr<PeerCopies> peer_copies);

}  // namespace lockstep::train

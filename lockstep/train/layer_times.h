// How long the layers of a language model take.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/models/language_model.h>

namespace lockstep::train {

// Seconds of forward and backward of a micro-batch, for each layer. The first includes the
// embedding and the last the head; those between are taken to be alike. `autocast` is the type that
// operators compute in, as in training. Gradients are undefined afterwards. Every rank that shares
// the model's layers or sequences calls it, before any stage is cut off.
std::vector<double> seconds_of_layers(models::LanguageModel& model, std::int64_t micro_batch,
                                      std::int64_t sequence_length,
                                      std::optional<c10::ScalarType> autocast = {});

}  // namespace lockstep::train

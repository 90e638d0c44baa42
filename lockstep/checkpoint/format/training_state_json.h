// A TrainingState within a larger JSON text. Only our .cpp files include this.
#pragma once

#include <lockstep/checkpoint/format/training_state.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

namespace lockstep::checkpoint {

// Of what to_text() gave. UsageError as parse_state.
TrainingState state_at(const JsonPlace& place);

}  // namespace lockstep::checkpoint

// What a run's progress is counted in.
#pragma once

namespace lockstep::train {

enum class Counted { samples, tokens };

}  // namespace lockstep::train

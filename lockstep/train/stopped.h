// The end of a run that all ranks come to together.
#pragma once

#include <lockstep/base/error.h>

namespace lockstep::train {

// A run that every rank gives up at the same point, for a reason that only its user can mend: one
// rank need say it.
class TrainingStopped : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep::train

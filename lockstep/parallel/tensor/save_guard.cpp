#include <lockstep/parallel/tensor/save_guard.h>

#include <ostream>

#include <lockstep/base/error.h>

namespace lockstep::tensor {

bool SaveGuard::is_serializable() const {
  throw UsageError("torch::save() and torch::load() find nothing of a layer's weights that is {}: "
                   "write what full_state_dict() returns on the first rank, and load into the "
                   "model before parallelize_module(), or with load_full_state_dict()",
                   cut_);
}

void SaveGuard::pretty_print(std::ostream& stream) const { stream << cut_; }

}  // namespace lockstep::tensor

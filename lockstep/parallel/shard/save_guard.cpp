#include <lockstep/parallel/shard/save_guard.h>

#include <ostream>

#include <lockstep/base/error.h>

namespace lockstep::shard {

void SaveGuard::save(torch::serialize::OutputArchive&) const {
  throw UsageError("torch::save() would write a sharded model without its weights ({}): write what "
                   "full_state_dict() returns on the first rank",
                   summary_);
}

void SaveGuard::load(torch::serialize::InputArchive&) {
  throw UsageError(
      "torch::load() cannot read into a sharded model ({}): load into the model before "
      "wrap_model(), or call load_full_state_dict()",
      summary_);
}

void SaveGuard::pretty_print(std::ostream& stream) const { stream << summary_; }

}  // namespace lockstep::shard

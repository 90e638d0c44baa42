#include <lockstep/nn/tensor_axis.h>

#include <lockstep/base/error.h>

namespace lockstep::nn {

const std::shared_ptr<comm::Communicator>& TensorAxis::holders_of_part(int num_parts) {
  LOCKSTEP_CHECK(num_parts > 0 && size() % num_parts == 0);
  auto& holders = holders_[num_parts];
  if (holders == nullptr) {
    const int part = rank() * num_parts / size();
    holders = group_->split(
        part, rank(), fmt::format("{}, holders of part {} of {}", group_->name(), part, num_parts));
  }
  return holders;
}

}  // namespace lockstep::nn

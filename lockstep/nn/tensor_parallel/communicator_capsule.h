// Keeps the group of an autograd function until backward.
#pragma once

#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::nn::internal {

struct CommunicatorCapsule : torch::CustomClassHolder {
  explicit CommunicatorCapsule(std::shared_ptr<comm::Communicator> group)
      : group(std::move(group)) {}
  std::shared_ptr<comm::Communicator> group;
};

inline c10::IValue kept(std::shared_ptr<comm::Communicator> group) {
  return c10::IValue::make_capsule(c10::make_intrusive<CommunicatorCapsule>(std::move(group)));
}

inline std::shared_ptr<comm::Communicator> kept_group(const c10::IValue& value) {
  return c10::static_intrusive_pointer_cast<CommunicatorCapsule>(value.toCapsule())->group;
}

}  // namespace lockstep::nn::internal

#include <lockstep/device/backward_thread.h>

namespace lockstep::device {

namespace {

// LibTorch copies the information of a thread to those that run its backward pass. It uses this
// kind for nothing itself. It is no constant in newer versions.
c10::DebugInfoKind kind() { return c10::DebugInfoKind::PRODUCER_INFO; }

struct Caller final : c10::DebugInfoBase {
  std::uint64_t number = this_thread_number();
};

const Caller* caller() {
  return dynamic_cast<const Caller*>(c10::ThreadLocalDebugInfo::get(kind()));
}

}  // namespace

BackwardThread::BackwardThread()
    : guard_(kind(), caller() == nullptr ? std::make_shared<Caller>() : nullptr) {}

AsBackwardThread::AsBackwardThread() {
  if (const Caller* const one = caller(); one != nullptr && one->number != this_thread_number())
    number_.emplace(one->number);
}

}  // namespace lockstep::device

// How tensors on GPUs travel in a group of ours, where they need not pass through the host's
// memory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

class DeviceLane;

// A lane is given this by its group, which outlives it. The functions may be called from any
// thread.
struct LaneGroup {
  GroupInfo info;
  std::shared_ptr<flight::Recorder> recorder;
  // While the lane connects, over the host: every rank calls the same of these at the same point.
  std::function<bool(bool well)> all_are_well;
  std::function<void(const at::Tensor& bytes)> broadcast;  // the first rank's
  // The lane has failed by itself: ends the group, which ends the lane.
  std::function<void(const CommError::Details& fault)> failed;
  // To be called every now and then while a call takes its time: the group looks whether its ranks
  // are there, and ends where they are not.
  std::function<void(const Fingerprint& call)> look;
  milliseconds timeout{0};  // of connecting
};

// Connects a lane: every rank of the group calls it.
using MakeLane = std::function<std::unique_ptr<DeviceLane>(LaneGroup group)>;

// The lane that a group is to have. Where there is none, or where it cannot be connected on some
// rank, tensors on GPUs go through the host's memory.
struct Lane {
  MakeLane make = nullptr;
  std::string title = "";  // what messages call it
  bool is_needed = true;   // it is an error where it cannot be connected
};

// The group's ranks compare the lane's calls over the host, beside them, so a lane does not look
// for mismatched calls, or for ranks that do not come.
//
// Threading: one thread at a time starts calls, splits or leaves; end() may come from any.
class DeviceLane {
 public:
  virtual ~DeviceLane() = default;
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // The name of its backend.
  virtual std::string name() const = 0;

  // UsageError for a tensor on another device than the lane's.
  virtual void check(Operation operation, const at::Tensor& tensor) const = 0;

  // A call whose tensors are on the lane's device, after what the current stream has been told so
  // far.
  virtual std::shared_ptr<PendingCall> start(Call call) = 0;

  // How the lane of a group of `group_size` of these ranks is made; null for a group of one, and
  // for a rank whose color is negative. All ranks of this group call it at the same point.
  virtual MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) = 0;

  // The group has failed with this: calls in flight and later ones throw it.
  virtual void end(const CommError::Details& fault) = 0;

  // CommError where the group has failed and no call has said so yet.
  virtual void check_results() = 0;

  // Waits for the calls in flight; from then on the lane no longer calls its group. Only the
  // destructor and end() may follow.
  virtual void leave() = 0;

 protected:
  DeviceLane() = default;
};

}  // namespace lockstep::comm

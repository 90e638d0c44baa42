// A lane carries the tensors on GPUs of a group over our transports, without a copy in the host's
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

// A group gives this to its lane, which it outlives. Any thread may call the functions.
struct LaneGroup {
  GroupInfo info;
  std::shared_ptr<flight::Recorder> recorder;
  // For use while the lane connects, over the host: every rank calls the same function at the same
  // point.
  std::function<bool(bool well)> all_are_well;
  // sends the first rank's bytes to all ranks
  std::function<void(const at::Tensor& bytes)> broadcast;
  // Ends the group because the lane has failed by itself; the group then ends the lane.
  std::function<void(const CommError::Details& fault)> failed;
  // Called every now and then while a call takes long: the group checks whether its ranks are still
  // there, and ends if they are not.
  std::function<void(const Fingerprint& call)> look;
  milliseconds timeout{0};  // for connecting
};

// Connects a lane: every rank of the group calls it.
using MakeLane = std::function<std::unique_ptr<DeviceLane>(LaneGroup group)>;

// The lane that a group is to have. Without one, or if some rank cannot connect it, tensors on GPUs
// go through the host's memory.
struct Lane {
  MakeLane make = nullptr;
  std::string title = "";  // its name in messages
  bool is_needed = true;   // failing to connect it is an error
};

// The group's ranks compare the lane's calls over the host, beside them, so a lane does not look
// for mismatched calls, or for ranks that do not come.
//
// Threading: one thread at a time starts calls, splits or leaves; any thread may call end().
class DeviceLane {
 public:
  virtual ~DeviceLane() = default;
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // The name of the lane's backend.
  virtual std::string name() const = 0;

  // Throws UsageError for a tensor on another device than the lane's.
  virtual void check(Operation operation, const at::Tensor& tensor) const = 0;

  // Starts a call whose tensors are on the lane's device. It runs after the work that the current
  // stream has been given so far.
  virtual std::shared_ptr<PendingCall> start(Call call) = 0;

  // Returns how to make the lane of a new group of `group_size` of these ranks; null for a group of
  // one, and for a rank whose color is negative. All ranks of this group call it at the same point.
  virtual MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) = 0;

  // Ends the lane because the group has failed: calls in flight and later ones throw this fault.
  virtual void end(const CommError::Details& fault) = 0;

  // Throws CommError if the group has failed and no call has thrown the failure yet.
  virtual void check_results() = 0;

  // Waits for the calls in flight; afterwards the lane no longer calls its group. Only the
  // destructor and end() may follow.
  virtual void leave() = 0;

 protected:
  DeviceLane() = default;
};

}  // namespace lockstep::comm

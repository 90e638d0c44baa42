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
#include <lockstep/comm/work.h>

namespace lockstep::comm {

class DeviceLane;

// What a lane gets of the group that it is for.
struct LaneGroup {
  GroupInfo info;
  std::string id;  // the same on all of its ranks, and no other group's
  std::shared_ptr<flight::Recorder> recorder;
  // To be called once, from any thread, when the lane has failed by itself: ends the group, and
  // notes that in its journal.
  std::function<void(const CommError::Details& fault)> failed;
  milliseconds timeout{0};  // of connecting
};

// Connects a lane: every rank of the group calls it.
using MakeLane = std::function<std::unique_ptr<DeviceLane>(LaneGroup group)>;

// A lane and its group fail together: the lane tells the group through LaneGroup::failed, the group
// tells the lane through end().
//
// Threading: one thread at a time starts calls or splits; end() may come from any.
class DeviceLane {
 public:
  virtual ~DeviceLane() = default;
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // "nccl".
  virtual std::string name() const = 0;

  // UsageError for a tensor on another device than the lane's.
  virtual void check(Operation operation, const at::Tensor& tensor) const = 0;

  // A call whose tensors are on the lane's device. It is enqueued when this returns, after what the
  // current stream has been told so far.
  virtual std::shared_ptr<PendingCall> start(Call call) = 0;

  // How the lane of a group of `group_size` of these ranks is made; null for a group of one, and
  // for a rank whose color is negative. All ranks of this group call it at the same point.
  virtual MakeLane split(const SplitRequest& request, int group_size, Deadline deadline) = 0;

  // The group has failed with this: calls in flight and later ones throw it, here and on ranks that
  // hear of nothing while they wait for a GPU.
  virtual void end(const CommError::Details& fault) = 0;

 protected:
  DeviceLane() = default;
};

}  // namespace lockstep::comm

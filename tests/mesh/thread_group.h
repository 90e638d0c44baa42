// A Communicator whose ranks are threads of this process and that can only split: enough to test
// which rank is in which group without a backend.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep::mesh::testing {

class ThreadGroup : public comm::Communicator {
 public:
  // The state that the members of one group share.
  struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    struct Split {
      std::map<int, comm::SplitRequest> requests;                // keyed by rank
      std::map<int, std::shared_ptr<Meeting>> meeting_of_color;  // of the new groups
    };
    std::map<std::uint64_t, Split> splits;  // keyed by number
  };

  ThreadGroup(comm::GroupInfo info, std::shared_ptr<Meeting> meeting, milliseconds timeout)
      : Communicator(std::move(info), timeout), meeting_(std::move(meeting)) {}

  std::string backend() const override { return "threads"; }
  bool canonical_order() const override { return false; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return std::nullopt; }

  // The number of splits for which this rank has asked so far.
  int num_splits() const { return num_splits_; }

 private:
  std::shared_ptr<comm::PendingCall> do_start(comm::Call call) override;
  std::shared_ptr<Communicator> do_split(const comm::SplitRequest& request,
                                         Deadline deadline) override;
  void do_abort(const std::string& reason) override;
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void do_check(comm::Operation operation, const at::Tensor& tensor) const override;

  std::shared_ptr<Meeting> meeting_;
  int num_splits_ = 0;
};

// Runs `body` as each rank of a new world, and rethrows the exception of the lowest failing rank.
void run_ranks(int world_size, const std::function<void(std::shared_ptr<ThreadGroup>)>& body,
               milliseconds timeout = milliseconds(20000), std::uint32_t generation = 0);

}  // namespace lockstep::mesh::testing

#include "thread_group.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <thread>
#include <tuple>

#include <lockstep/base/error.h>

namespace lockstep::mesh::testing {

std::shared_ptr<comm::Communicator> ThreadGroup::do_split(const comm::SplitRequest& request,
                                                          Deadline deadline) {
  ++num_splits_;
  std::unique_lock lock(meeting_->mutex);
  auto& split = meeting_->splits[request.number];
  split.requests[rank()] = request;
  auto& next = split.meeting_of_color[request.color];
  if (next == nullptr) next = std::make_shared<Meeting>();
  meeting_->changed.notify_all();
  const bool all = meeting_->changed.wait_until(
      lock, deadline.at(), [&] { return static_cast<int>(split.requests.size()) == size(); });
  if (!all) {
    std::vector<int> missing;
    for (int other = 0; other < size(); ++other)
      if (!split.requests.contains(other)) missing.push_back(other);
    throw CommError({.fault = Fault::timeout,
                     .operation = "split",
                     .group = name(),
                     .ranks = missing,
                     .explanation = "they did not ask for this group"});
  }
  std::vector<std::tuple<int, int>> members;  // key, and rank in this group
  for (const auto& [other, theirs] : split.requests)
    if (theirs.color == request.color) members.emplace_back(theirs.key, other);
  std::sort(members.begin(), members.end());
  comm::GroupInfo group{.name = request.name, .global_ranks = {}, .generation = generation()};
  for (const auto& [key, other] : members) {
    if (other == rank()) group.rank = static_cast<int>(group.global_ranks.size());
    group.global_ranks.push_back(global_ranks()[static_cast<std::size_t>(other)]);
  }
  return std::make_shared<ThreadGroup>(std::move(group), next, timeout());
}

std::shared_ptr<comm::PendingCall> ThreadGroup::do_start(comm::Call) {
  throw UsageError("a group of threads only splits");
}
void ThreadGroup::do_abort(const std::string&) {
  throw UsageError("a group of threads only splits");
}
at::Tensor ThreadGroup::do_allocate(at::IntArrayRef, at::ScalarType) {
  throw UsageError("a group of threads only splits");
}
void ThreadGroup::do_check(comm::Operation, const at::Tensor&) const {
  throw UsageError("a group of threads only splits");
}

void run_ranks(int world_size, const std::function<void(std::shared_ptr<ThreadGroup>)>& body,
               milliseconds timeout, std::uint32_t generation) {
  std::vector<int> global_ranks(static_cast<std::size_t>(world_size));
  std::iota(global_ranks.begin(), global_ranks.end(), 0);
  const auto meeting = std::make_shared<ThreadGroup::Meeting>();
  std::vector<std::exception_ptr> errors(global_ranks.size());
  std::vector<std::thread> threads;
  for (const int rank : global_ranks) {
    threads.emplace_back([&, rank] {
      try {
        body(std::make_shared<ThreadGroup>(
            comm::GroupInfo{.rank = rank, .global_ranks = global_ranks, .generation = generation},
            meeting, timeout));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace lockstep::mesh::testing

// Finds ranks that wait for each other in calls of different groups, or for one that has refused to
// come, and ends those calls with an error that names all of them.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/flight/circle.h>

namespace lockstep::comm {

// Within one group, the first message of a call shows that ranks are in different calls. Between
// groups no message shows that, because each rank waits for messages of its own group. So every
// rank of a job has a thread that looks at the calls in which the rank's threads are blocked. For a
// call that takes longer than a second it asks the ranks that have not come to it, through their
// endpoints, which call they are blocked in, and follows the answers (flight/circle.h, which also
// says why there are no false alarms). If the answers form a circle, and do so again a moment
// later, the rank that found the circle tells all ranks of the groups of those calls. Only when all
// of them know do the ranks in the circle end their calls, and the groups fail on all of their
// ranks: the first rank to leave closes connections, and the others would otherwise report that
// instead of the reason.
//
// A rank that has thrown a UsageError instead of going on to its next call, where the others have
// not, says so when it is asked (flight::Refusal). It is asked twice, too: it may come after all.
//
// It sees only threads that wait on the host. Waits that only order a device's stream, as those of
// NCCL, block no thread; there the deadline is the only guard.
//
// Shared by the groups of a rank, which end before it. Thread-safe. Only the constructor throws. A
// rank that does not answer counts as not blocked.
class WaitWatch {
 public:
  struct Times {
    // How long a call may take before other ranks are asked about it.
    milliseconds grace{1000};
    // How often waits are looked at.
    milliseconds interval{500};
    // The time between the two looks at a circle.
    milliseconds second_look{300};
  };

  // `addresses` are those of the job's ranks, in order.
  WaitWatch(std::shared_ptr<Endpoint> endpoint, int rank, std::vector<EndpointAddress> addresses)
      : WaitWatch(std::move(endpoint), rank, std::move(addresses), Times{}) {}
  WaitWatch(std::shared_ptr<Endpoint> endpoint, int rank, std::vector<EndpointAddress> addresses,
            Times times);
  ~WaitWatch();
  WaitWatch(const WaitWatch&) = delete;
  WaitWatch& operator=(const WaitWatch&) = delete;

  // Makes the group fail with this error. Called from the watch's thread.
  using End = std::function<void(CommError::Details error)>;

  // A group is watched while this lives. Its destructor returns once no End is running.
  class Watched {
   public:
    Watched(WaitWatch& watch, std::string id) : watch_(watch), id_(std::move(id)) {}
    ~Watched() { watch_.forget(id_); }
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

    // The group's failure if a circle was found: every call of the group throws it from then on,
    // with its own operation and number.
    std::optional<CommError::Details> verdict() const { return watch_.verdict(id_); }

   private:
    WaitWatch& watch_;
    const std::string id_;
  };
  // `id` is the same on all ranks of the group, and differs from every other group's.
  std::unique_ptr<Watched> watch(const std::string& id,
                                 std::shared_ptr<const flight::Recorder> recorder, End end);

 private:
  struct Group {
    std::shared_ptr<const flight::Recorder> recorder;
    std::optional<CommError::Details> verdict;  // guarded by the watch's mutex
    std::mutex mutex;
    End end;  // null once the group is gone
  };
  using WaitKey = std::tuple<std::string, std::uint64_t, std::uint64_t>;  // group, thread, entry

  void forget(const std::string& id);
  std::optional<CommError::Details> verdict(const std::string& id);
  std::string answer(const std::string& question);
  void run();
  // Sleeps for `span`; false if the watch ends.
  bool pause(milliseconds span);
  void end_calls();
  void look();
  // Tells these ranks' groups why calls end, and then ends them.
  void tell(std::string text, const std::vector<int>& at_fault,
            const std::vector<flight::BlockedCall>& calls);
  bool send(int rank, const std::string& message);
  void take(const flight::CircleNews& news);
  void end_call(const flight::CallToEnd& ending);

  const std::shared_ptr<Endpoint> endpoint_;
  const int rank_;
  const std::vector<EndpointAddress> addresses_;
  const Times times_;
  flight::OpenCalls open_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Group>> groups_;
  std::vector<flight::CallToEnd> endings_;
  bool stopping_ = false;
  std::map<WaitKey, Clock::time_point> next_look_;  // only the thread uses it
  std::thread thread_;
};

}  // namespace lockstep::comm

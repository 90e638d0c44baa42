#include <lockstep/comm/backends/nccl/nccl_library.h>

#include <dlfcn.h>

#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>

namespace lockstep::comm::backends {

namespace {

// How long a process waits for NCCL to close its communicators when it ends, and how long a call
// waits.
constexpr milliseconds kClosingAtExit{5000};
constexpr milliseconds kClosingBeforeCall{1500};

template <typename Function>
void find(Function& function, const char* name, void* library) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

NcclLibrary find_library() {
  void* library = RTLD_DEFAULT;
  if (::dlsym(library, "ncclGetVersion") == nullptr) {
    // Never closed, because it is used until the process ends.
    library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw UsageError(
          "NCCL is not in this process, and libnccl.so.2 is not found ({}): install it "
          "(Debian: libnccl2), or use the backend shm or tcp",
          ::dlerror());
  }
  // Makes a communicator connect its ranks when it is made, instead of in each rank's first call,
  // which the ranks make at different times.
  ::setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  NcclLibrary nccl{};
  find(nccl.get_version, "ncclGetVersion", library);
  find(nccl.get_unique_id, "ncclGetUniqueId", library);
  find(nccl.comm_init_rank, "ncclCommInitRank", library);
  find(nccl.comm_split, "ncclCommSplit", library);
  find(nccl.comm_finalize, "ncclCommFinalize", library);
  find(nccl.comm_destroy, "ncclCommDestroy", library);
  find(nccl.comm_abort, "ncclCommAbort", library);
  find(nccl.comm_get_async_error, "ncclCommGetAsyncError", library);
  find(nccl.get_error_string, "ncclGetErrorString", library);
  find(nccl.get_last_error, "ncclGetLastError", library);
  find(nccl.group_start, "ncclGroupStart", library);
  find(nccl.group_end, "ncclGroupEnd", library);
  find(nccl.all_reduce, "ncclAllReduce", library);
  find(nccl.broadcast, "ncclBroadcast", library);
  find(nccl.all_gather, "ncclAllGather", library);
  find(nccl.reduce_scatter, "ncclReduceScatter", library);
  find(nccl.send, "ncclSend", library);
  find(nccl.receive, "ncclRecv", library);
  int version = 0;
  nccl.get_version(&version);
  if (version < NCCL_VERSION(2, 19, 0))
    throw UsageError("the NCCL of this process is version {}, and Lockstep needs 2.19 or newer",
                     nccl.version());
  return nccl;
}

// Runs `task` in a thread and returns its future at `until` at the latest; if the task is not over
// by then, the thread goes on and nobody waits for it.
template <typename Task>
auto run_until(const Clock::time_point& until, Task task) {
  std::packaged_task<std::invoke_result_t<Task>()> run(std::move(task));
  auto result = run.get_future();
  std::thread(std::move(run)).detach();
  (void)result.wait_until(until);
  return result;
}

bool is_there(const auto& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// Closes communicators, but never while a call is in flight (see NcclCallInFlight). NCCL takes half
// a second to close one, because its own thread checks no more often whether it is to end; so all
// communicators that are due are closed at the same time.
class Closings {
 public:
  // Never destroyed: threads that were left behind may use it until the process is gone.
  static Closings& get() {
    static Closings& all = *new Closings;
    // NCCL must be closed before CUDA is unloaded.
    static const struct AtExit {
      ~AtExit() { all.end(); }
    } at_exit;
    return all;
  }

  void add(std::function<void()> close) {
    const std::lock_guard lock(mutex_);
    due_.push_back(std::move(close));
    if (num_calls_ == 0) start();
  }

  void begin_call() {
    std::unique_lock lock(mutex_);
    if (num_closing_ > 0)
      changed_.wait_until(lock, since_ + kClosingBeforeCall, [this] { return num_closing_ == 0; });
    ++num_calls_;
  }
  void end_call() {
    const std::lock_guard lock(mutex_);
    if (--num_calls_ == 0) start();
  }

 private:
  void start() {
    if (due_.empty()) return;
    since_ = Clock::now();
    for (const auto& close : std::exchange(due_, {})) {
      ++num_closing_;
      std::thread([this, close] {
        close();
        const std::lock_guard lock(mutex_);
        --num_closing_;
        changed_.notify_all();
      }).detach();
    }
  }

  void end() {
    std::unique_lock lock(mutex_);
    start();
    changed_.wait_for(lock, kClosingAtExit, [this] { return num_closing_ == 0; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> due_;
  int num_calls_ = 0;
  int num_closing_ = 0;
  Clock::time_point since_;  // when the closing communicators began to close
};

// Runs `task` in another thread, because NCCL waits for ranks that never come and cannot be told to
// stop.
template <typename Task>
std::shared_ptr<NcclComm> make_by(const Deadline& deadline, Task task) {
  auto made = run_until(deadline.at(), std::move(task));
  if (!is_there(made))
    throw CommError({.fault = Fault::timeout,
                     .operation = "connecting nccl",
                     .explanation = fmt::format("NCCL had not connected the ranks after {:.1f} s",
                                                deadline.span_seconds())});
  return made.get();
}

}  // namespace

const NcclLibrary& NcclLibrary::get() {
  static const NcclLibrary library = find_library();
  return library;
}

std::string NcclLibrary::version() const {
  int number = 0;
  get_version(&number);
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

std::string NcclLibrary::text(ncclResult_t result) const {
  std::string text = get_error_string(result);
  if (const char* const last = get_last_error(nullptr); last != nullptr && *last != '\0')
    text += fmt::format(" ({})", last);
  return text;
}

void NcclLibrary::check(ncclResult_t result, const char* function) const {
  if (result == ncclSuccess) return;
  throw NcclError(fmt::format("{}: {}", function, text(result)));
}

std::shared_ptr<NcclComm> NcclComm::connect(const ncclUniqueId& id, int rank, int size,
                                            const Deadline& deadline) {
  return make_by(deadline, [id, rank, size, device = c10::cuda::current_device()] {
    const NcclLibrary& nccl = NcclLibrary::get();
    c10::cuda::set_device(device);
    ncclComm_t comm = nullptr;
    nccl.check(nccl.comm_init_rank(&comm, size, id, rank), "ncclCommInitRank");
    return std::shared_ptr<NcclComm>(new NcclComm(comm, device));
  });
}

std::shared_ptr<NcclComm> NcclComm::split(const std::shared_ptr<NcclComm>& parent, int color,
                                          int key, const Deadline& deadline) {
  return make_by(deadline, [parent, color, key] {
    const NcclLibrary& nccl = NcclLibrary::get();
    c10::cuda::set_device(parent->device_);
    const Use use(*parent);
    ncclComm_t comm = nullptr;
    nccl.check(
        nccl.comm_split(use.get(), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &comm, nullptr),
        "ncclCommSplit");
    return std::shared_ptr<NcclComm>(comm == nullptr ? nullptr
                                                     : new NcclComm(comm, parent->device_));
  });
}

NcclComm::~NcclComm() {
  if (take_over()) (void)NcclLibrary::get().comm_abort(comm_);
}

NcclComm::Use::Use(NcclComm& comm) : comm_(comm), lock_(comm.in_use_) {
  const std::lock_guard lock(comm.mutex_);
  if (comm.over_) throw NcclError("the communicator was aborted");
}

bool NcclComm::take_over() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(over_, true);
}

void NcclComm::close() {
  if (!take_over()) return;
  Closings::get().add([self = shared_from_this()] {
    const NcclLibrary& nccl = NcclLibrary::get();
    c10::cuda::set_device(self->device_);
    (void)nccl.comm_finalize(self->comm_);
    (void)nccl.comm_destroy(self->comm_);
  });
}

std::future<void> NcclComm::abort(std::function<void()> then) {
  return run_until(Clock::now(), [self = shared_from_this(), then = std::move(then)] {
    bool mine = false;
    {
      const std::lock_guard use(self->in_use_);
      mine = self->take_over();
    }
    if (mine) (void)NcclLibrary::get().comm_abort(self->comm_);
    then();
  });
}

std::string NcclComm::problem() {
  const NcclLibrary& nccl = NcclLibrary::get();
  const std::lock_guard lock(mutex_);
  if (over_) return "";
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = nccl.comm_get_async_error(comm_, &result);
  if (asked != ncclSuccess) result = asked;
  return result == ncclSuccess || result == ncclInProgress ? "" : nccl.text(result);
}

NcclCallInFlight::NcclCallInFlight() { Closings::get().begin_call(); }
NcclCallInFlight::~NcclCallInFlight() { Closings::get().end_call(); }

NcclGroupCall::NcclGroupCall() {
  const NcclLibrary& nccl = NcclLibrary::get();
  nccl.check(nccl.group_start(), "ncclGroupStart");
}

// NCCL counts the groups that each thread has begun: one that was not ended would hold back all
// later calls.
NcclGroupCall::~NcclGroupCall() {
  if (open_) (void)NcclLibrary::get().group_end();
}

void NcclGroupCall::end() {
  const NcclLibrary& nccl = NcclLibrary::get();
  open_ = false;
  nccl.check(nccl.group_end(), "ncclGroupEnd");
}

}  // namespace lockstep::comm::backends

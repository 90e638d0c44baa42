// NCCL's own functions, taken from the library that LibTorch has brought into this process.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>

namespace lockstep::comm::backends {

// The functions are looked up by name on first use. LibTorch's NCCL may be a library of its own or
// a part of LibTorch's; if we linked a second one beside it, that might be of another version.
struct NcclLibrary {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRank) comm_init_rank;
  decltype(&::ncclCommSplit) comm_split;
  decltype(&::ncclCommFinalize) comm_finalize;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGetLastError) get_last_error;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  decltype(&::ncclAllReduce) all_reduce;
  decltype(&::ncclBroadcast) broadcast;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) receive;

  // UsageError if this process has no NCCL, or one older than 2.19.
  static const NcclLibrary& get();
  // Such as "2.28.9".
  std::string version() const;
  // NCCL's text for a result, and for the error before it.
  std::string text(ncclResult_t result) const;
  // Throws NcclError if the result is a failure.
  void check(ncclResult_t result, const char* function) const;
};

// An error that NCCL reports.
class NcclError : public Error {
 public:
  using Error::Error;
};

// Owns a communicator of NCCL's.
//
// Threading: one thread at a time uses it; abort() and problem() may come from any.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  // Connects `size` ranks that have the same id, each with its current device. Throws CommError
  // (timeout) if NCCL has not connected them by the deadline, and NcclError.
  static std::shared_ptr<NcclComm> connect(const ncclUniqueId& id, int rank, int size,
                                           const Deadline& deadline);
  // Makes one communicator of those ranks of `parent` that give the same color, in the order of
  // their keys; null for a negative color. All ranks of the parent call it, with no call of theirs
  // under way in it. Fails as connect() does.
  static std::shared_ptr<NcclComm> split(const std::shared_ptr<NcclComm>& parent, int color,
                                         int key, const Deadline& deadline);

  // Aborts the communicator, unless it was closed.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Held while something is enqueued: the communicator is not aborted meanwhile. NcclError if it
  // was aborted before.
  class Use {
   public:
    explicit Use(NcclComm& comm);
    ncclComm_t get() const { return comm_.comm_; }

   private:
    NcclComm& comm_;
    std::unique_lock<std::mutex> lock_;
  };

  // Closes the communicator in good order, in a thread of its own, once the enqueued work has ended
  // and no call is in flight (NcclCallInFlight). The process waits some seconds for that when it
  // ends.
  void close();

  // Aborts the work on the device, in a thread of its own: NCCL may take long for that, and another
  // thread may still be inside NCCL and has to come out first. `then` runs after the abort; if the
  // communicator was over already, it runs at once.
  std::future<void> abort(std::function<void()> then);

  // NCCL's error outside of calls; empty if there is none.
  std::string problem();

 private:
  NcclComm(ncclComm_t comm, c10::DeviceIndex device) : comm_(comm), device_(device) {}
  bool take_over();  // true if it was not over yet: the caller then ends it

  const ncclComm_t comm_;
  const c10::DeviceIndex device_;
  std::mutex in_use_;
  std::mutex mutex_;
  bool over_ = false;
};

// A call of this process in any communicator, from before it is enqueued until it has ended on the
// device. No communicator is closed meanwhile. Closing frees memory; for that CUDA waits until
// every kernel of the process has ended, and blocks other threads that call it. A kernel of NCCL's
// may wait for another rank, which may in turn wait for a thread blocked here. A new call waits for
// communicators that are being closed.
class NcclCallInFlight {
 public:
  NcclCallInFlight();
  ~NcclCallInFlight();
  NcclCallInFlight(const NcclCallInFlight&) = delete;
  NcclCallInFlight& operator=(const NcclCallInFlight&) = delete;
};

// Calls of NCCL between the constructor and end() become one call, which NCCL runs at end().
class NcclGroupCall {
 public:
  NcclGroupCall();
  ~NcclGroupCall();
  NcclGroupCall(const NcclGroupCall&) = delete;
  NcclGroupCall& operator=(const NcclGroupCall&) = delete;

  void end();

 private:
  bool open_ = true;
};

// Puts an operation of a Communicator on a stream, which is the current one, as calls of NCCL.
// Throws NcclError.
void enqueue_collective(NcclComm& comm, const Call& call, int num_ranks,
                        const c10::cuda::CUDAStream& stream);

}  // namespace lockstep::comm::backends

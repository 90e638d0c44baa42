// NCCL's own functions: those of the library that LibTorch has brought into this process.
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

// Found by name when they are needed first. LibTorch's NCCL may be a library of its own or a part
// of LibTorch's; a second one beside it, linked by us, might be of another version.
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

  // UsageError where this process has none, or one older than 2.19.
  static const NcclLibrary& get();
  // "2.28.9".
  std::string version() const;
  // What NCCL says of a result, and of what came before it.
  std::string text(ncclResult_t result) const;
  // NcclError where it is a failure.
  void check(ncclResult_t result, const char* function) const;
};

// An error that NCCL reports.
class NcclError : public Error {
 public:
  using Error::Error;
};

// A communicator of NCCL's.
//
// Threading: one thread at a time uses it; abort() and problem() may come from any.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  // Connects `size` ranks that have the same id, each with its current device. CommError (timeout)
  // where NCCL has not done it by the deadline; NcclError.
  static std::shared_ptr<NcclComm> connect(const ncclUniqueId& id, int rank, int size,
                                           const Deadline& deadline);
  // One of those ranks of `parent` that give the same color, in the order of their keys; null for a
  // negative color. All ranks of the parent call it, with nothing of theirs under way in it.
  // Failure: as connect().
  static std::shared_ptr<NcclComm> split(const std::shared_ptr<NcclComm>& parent, int color,
                                         int key, const Deadline& deadline);

  // Aborts it, unless it was closed.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Held while something is enqueued: nobody aborts the communicator meanwhile. NcclError where it
  // was aborted.
  class Use {
   public:
    explicit Use(NcclComm& comm);
    ncclComm_t get() const { return comm_.comm_; }

   private:
    NcclComm& comm_;
    std::unique_lock<std::mutex> lock_;
  };

  // Ends it in good order, once what was enqueued has ended: in a thread of its own, while no call
  // is in flight (NcclCallInFlight). The process waits for that when it ends, for some seconds.
  void close();

  // Ends what is on the device: in a thread of its own, as NCCL may take its time for that, and as
  // somebody may be inside of NCCL, who has to come out first. `then` runs when it has ended; where
  // it had ended before, at once.
  std::future<void> abort(std::function<void()> then);

  // What has gone wrong beside the calls; empty where nothing has.
  std::string problem();

 private:
  NcclComm(ncclComm_t comm, c10::DeviceIndex device) : comm_(comm), device_(device) {}
  bool take_over();  // whether it is still to be ended, which the caller does

  const ncclComm_t comm_;
  const c10::DeviceIndex device_;
  std::mutex in_use_;
  std::mutex mutex_;
  bool over_ = false;
};

// A call of this process in any communicator, from before it is enqueued until it has ended on the
// device. No communicator is closed meanwhile: that frees memory, for which CUDA waits until every
// kernel of the process has ended and holds up whoever else calls it; a kernel of NCCL's may wait
// for another rank, and that one for what is held up here. A new call waits for communicators that
// are being closed.
class NcclCallInFlight {
 public:
  NcclCallInFlight();
  ~NcclCallInFlight();
  NcclCallInFlight(const NcclCallInFlight&) = delete;
  NcclCallInFlight& operator=(const NcclCallInFlight&) = delete;
};

// What is enqueued from its making to end() is one call for NCCL, which runs it at once.
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

// The operations of a Communicator in terms of NCCL's: puts a call on a stream, which is the
// current one. Throws NcclError.
void enqueue_collective(NcclComm& comm, const Call& call, int num_ranks,
                        const c10::cuda::CUDAStream& stream);

}  // namespace lockstep::comm::backends

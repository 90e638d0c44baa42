// NCCL's own functions: those of the library that LibTorch has brought into this process.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include <nccl.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>

namespace lockstep::comm::engines {

// Found by name when they are needed first. LibTorch's NCCL may be a library of its own or a part
// of LibTorch's; a second one beside it, linked by us, might be of another version.
struct NcclLibrary {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRank) comm_init_rank;
  decltype(&::ncclCommSplit) comm_split;  // null before NCCL 2.18
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

  // UsageError where this process has none.
  static const NcclLibrary& get();
  // "2.28.9".
  std::string version() const;
  // What NCCL says of a result, and of what came before it.
  std::string text(ncclResult_t result) const;
  // NcclError where it is a failure.
  void check(ncclResult_t result, const char* function) const;
};

// What NCCL reports.
class NcclError : public Error {
 public:
  using Error::Error;
};

// A communicator of NCCL's.
//
// Threading: one thread at a time uses it; abort() and problem() may come from any.
class NcclComm {
 public:
  // Connects `size` ranks that have the same id, each with its current device. CommError (timeout)
  // where NCCL has not done it by the deadline; NcclError.
  static std::unique_ptr<NcclComm> connect(const ncclUniqueId& id, int rank, int size,
                                           const Deadline& deadline);
  // One of those ranks of `parent` that give the same color, in the order of their keys; null for a
  // negative color. All ranks of the parent call it; who waits there is thrown out by an abort of
  // the parent. Not where NcclLibrary::comm_split is null.
  static std::unique_ptr<NcclComm> split(NcclComm& parent, int color, int key);

  // What was enqueued must have ended, on all ranks, or it is lost.
  ~NcclComm() { abort(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Held while something is enqueued: nobody aborts the communicator meanwhile, unless that takes
  // too long. NcclError where it was aborted.
  class Use {
   public:
    explicit Use(NcclComm& comm);
    ncclComm_t get() const { return comm_.comm_; }

   private:
    NcclComm& comm_;
    std::unique_lock<std::timed_mutex> lock_;
  };

  // Ends what is on the device, and whoever waits inside of NCCL. Later calls do nothing.
  void abort();

  // What has gone wrong beside the calls; empty where nothing has.
  std::string problem();

 private:
  explicit NcclComm(ncclComm_t comm) : comm_(comm) {}

  const ncclComm_t comm_;
  std::timed_mutex in_use_;
  std::mutex mutex_;
  bool aborted_ = false;
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

}  // namespace lockstep::comm::engines

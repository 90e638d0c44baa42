#include <lockstep/comm/engines/mpi_runtime.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::comm::engines {

namespace {

struct Runtime {
  std::mutex turn;
  std::once_flag initialised;
  std::atomic<bool> abandoned{false};
  std::atomic<int> level{MPI_THREAD_SINGLE};
};

// Never destroyed: finalize() runs at exit, when other statics may be gone.
Runtime& runtime() {
  static auto* instance = new Runtime;
  return *instance;
}

void finalize() {
  if (runtime().abandoned) return;
  const auto turn = mpi_turn();
  int done = 0;
  MPI_Finalized(&done);
  if (done == 0) MPI_Finalize();
}

void initialize() {
  const auto turn = mpi_turn();
  int initialised = 0;
  MPI_Initialized(&initialised);
  int level = MPI_THREAD_SINGLE;
  if (initialised != 0) {
    MPI_Query_thread(&level);
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    std::atexit(&finalize);
  }
  if (level < MPI_THREAD_SERIALIZED)
    throw UsageError("the engine 'mpi' works in a thread of its own, but MPI was initialised with "
                     "thread level {} (MPI_THREAD_SERIALIZED, {}, is needed): call "
                     "MPI_Init_thread(…, MPI_THREAD_MULTIPLE, …), or leave it to Lockstep",
                     level, static_cast<int>(MPI_THREAD_SERIALIZED));
  runtime().level = level;
}

}  // namespace

void require_mpi() { std::call_once(runtime().initialised, &initialize); }

std::unique_lock<std::mutex> mpi_turn() { return std::unique_lock(runtime().turn); }

std::unique_lock<std::mutex> mpi_long_turn() {
  if (runtime().level >= MPI_THREAD_MULTIPLE) return {};
  return mpi_turn();
}

void abandon_mpi() { runtime().abandoned = true; }

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(
      fmt::format("{}: {}", what, std::string(text, static_cast<std::size_t>(length))));
}

}  // namespace lockstep::comm::engines

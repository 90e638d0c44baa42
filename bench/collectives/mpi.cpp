// Open MPI without Lockstep, for comparison. Argument: the largest size in MiB. Run under mpirun.
#include <mpi.h>

#include <vector>

#include "measure.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto measure = [&](const char* operation, std::size_t bytes, auto call) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double time = bench::median_microseconds(bytes, call);
    if (rank == 0) bench::report("openmpi", operation, size, bytes, time);
  };
  for (const std::size_t bytes : bench::sizes_up_to(argc > 1 ? argv[1] : nullptr)) {
    const int part = static_cast<int>(bytes / 4) / size;
    std::vector<float> whole(static_cast<std::size_t>(part * size));
    std::vector<float> own(static_cast<std::size_t>(part));
    measure("all_reduce", bytes, [&] {
      MPI_Allreduce(MPI_IN_PLACE, whole.data(), part * size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    measure("all_gather", bytes, [&] {
      MPI_Allgather(own.data(), part, MPI_FLOAT, whole.data(), part, MPI_FLOAT, MPI_COMM_WORLD);
    });
    measure("reduce_scatter", bytes, [&] {
      MPI_Reduce_scatter_block(whole.data(), own.data(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
  }
  MPI_Finalize();
}

// The engines' tests. Without arguments it runs the tests whose ranks are threads; under mpirun
// with --mpi or --mpi-faults the tests of MPI. With --victim it is a rank that will be killed.
#include <cstdlib>
#include <cstring>
#include <string>

#include <gtest/gtest.h>

int run_victim(int rank, int size, const char* store, int secret_fd);

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 6 && std::strcmp(argv[1], "--victim") == 0)
    return run_victim(std::atoi(argv[2]), std::atoi(argv[3]), argv[4], std::atoi(argv[5]));
  const std::string part = argc == 2 ? argv[1] : "";
  if (testing::GTEST_FLAG(filter) == "*")
    testing::GTEST_FLAG(filter) = part == "--mpi"          ? "Mpi.*"
                                  : part == "--mpi-faults" ? "MpiFaults.*"
                                                           : "-Mpi*";
  return RUN_ALL_TESTS();
}

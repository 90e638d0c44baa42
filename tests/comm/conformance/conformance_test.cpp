// One suite for every backend: each test launches one job of real processes, whose ranks run all
// cells and print their failures.
#include <algorithm>
#include <filesystem>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>

#include "../../launch/launched.h"
#include "../../launch/network.h"
#include "own_backend.h"

namespace lockstep::comm::conformance {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using launch::testing::Network;
using launch::testing::this_program;
using ::testing::HasSubstr;

struct Job {
  std::string backend;
  std::string device;
  int ranks;
};

void PrintTo(const Job& job, std::ostream* out) {
  *out << job.ranks << " ranks over " << job.backend << " with tensors on " << job.device;
}

int num_gpus() { return at::hasCUDA() ? c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount() : 0; }

bool available(const std::string& backend) {
  const auto backends = available_backends();
  return std::find(backends.begin(), backends.end(), backend) != backends.end();
}

Launched start(const Job& job) {
  std::vector<std::string> rank = {this_program(), "--rank", job.backend, job.device};
  const std::string number = std::to_string(job.ranks);
  if (job.backend != "mpi") {
    rank.insert(rank.begin(), {"--standalone", "--nproc-per-node", number});
    return Launched::run(rank);
  }
  rank.insert(rank.begin(),
              {LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", number});
  return Launched(rank, {"OMPI_MCA_btl_vader_single_copy_mechanism=none"});
}

// Expects the closing line of every rank, and no failure.
void expect_success(Launched& job, int ranks, const std::string& backend) {
  const int code = job.wait(milliseconds(100'000));
  const std::string output = job.output();
  int finished = 0;
  std::string failures;
  for (const std::string& line : launch::testing::lines_of(output)) {
    if (line.find("FAIL [") != std::string::npos) failures += line + "\n";
    if (line.ends_with(" cells, 0 failures")) ++finished;
  }
  EXPECT_EQ(failures, "");
  EXPECT_EQ(code, 0) << job.error();
  EXPECT_EQ(finished, ranks) << output << job.error();
  EXPECT_THAT(output, HasSubstr("backend " + backend + "\n"));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

// The backend that the world of a job should report.
std::string expected_backend(const Job& job) {
  if (job.backend != "auto" && job.backend != "nccl") return job.backend;
  const bool one_each = job.device == "cuda" && available("nccl") && job.ranks <= num_gpus();
  return job.ranks > 1 && (job.backend == "nccl" || one_each) ? "nccl+shm" : "shm";
}

class Conformance : public ::testing::TestWithParam<Job> {};

TEST_P(Conformance, EveryCell) {
  const Job& job = GetParam();
  if (job.backend != kOwnBackend && !available(job.backend))
    GTEST_SKIP() << "this build has no " << job.backend;
  if (job.device == "cuda" && num_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  if (job.backend == "mpi" && std::string(LOCKSTEP_MPIRUN).empty())
    GTEST_SKIP() << "there is no mpirun";
  Launched launched = start(job);
  expect_success(launched, job.ranks, expected_backend(job));
}

std::vector<Job> jobs() {
  std::vector<Job> all;
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const char* backend : {"auto", "tcp", "gloo", "mpi"})
      all.push_back({backend, "cpu", ranks});
    // It carries calls as tcp does, so one number of ranks is enough.
    if (ranks == 3) all.push_back({kOwnBackend, "cpu", ranks});
    all.push_back({"auto", "cuda", ranks});
    if (ranks != 3) all.push_back({"nccl", "cuda", ranks});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, Conformance, ::testing::ValuesIn(jobs()), [](const auto& info) {
  std::string name = info.param.backend + "_" + info.param.device;
  std::ranges::replace(name, '-', '_');
  return name + "_" + std::to_string(info.param.ranks);
});

// Shared memory inside hosts and TCP between them, as in a cluster.
TEST(Conformance, TwoHostsOfTwoAndThreeRanks) {
  const Network network(2);
  if (!network.works()) GTEST_SKIP() << "this process may not make network namespaces";
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  std::vector<Launched> hosts;
  for (int host = 0; host < 2; ++host)
    hosts.push_back(network.run(
        host, {"--nnodes", "2", "--node-rank", std::to_string(host), "--nproc-per-node",
               std::to_string(host + 2), "--rdzv-endpoint", Network::address(0) + ":29400",
               "--secret-file", secret, this_program(), "--rank", "auto", "cpu"}));
  for (int host = 0; host < 2; ++host)
    expect_success(hosts[static_cast<std::size_t>(host)], host + 2, "shm+tcp");
}

}  // namespace
}  // namespace lockstep::comm::conformance

// A measured timeline of ranks that share a host, with any transport, and of ranks that do not.
#include <algorithm>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>

#include "tests/launch/network.h"
#include "tests/ranks/job.h"

namespace lockstep::pipeline {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using launch::testing::Network;
using ::testing::HasSubstr;

TEST(Clocks, OfOneHostAreOne) {
  ranks::expect_cells_pass(3, {"--one-host"});
  ranks::expect_cells_pass(3, {"--one-host", "tcp"});
  const auto backends = comm::available_backends();
  if (std::ranges::find(backends, "gloo") != backends.end())
    ranks::expect_cells_pass(3, {"--one-host", "gloo"});
}

TEST(Clocks, OfSeveralHostsAreNot) {
  const Network network(2);
  if (!network.works()) GTEST_SKIP() << "this process may not make network namespaces";
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  std::vector<Launched> jobs;
  for (int host = 0; host < 2; ++host)
    jobs.push_back(network.run(
        host, {"--nnodes", "2", "--node-rank", std::to_string(host), "--rdzv-endpoint",
               Network::address(0) + ":29400", "--secret-file", secret, "--nproc-per-node", "1",
               std::filesystem::read_symlink("/proc/self/exe").string(), "--several-hosts"}));
  for (Launched& job : jobs) {
    EXPECT_EQ(job.wait(milliseconds(120'000)), 0) << job.output() << job.error();
    EXPECT_THAT(job.output(), HasSubstr("1 cells, 0 failures"));
  }
}

}  // namespace
}  // namespace lockstep::pipeline

// Jobs on several hosts, with each launcher in a network namespace of its own. The ranks stay until
// the test lets them finish.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "network.h"

namespace lockstep::launch::testing {

class ElasticNodes : public ::testing::Test {
 protected:
  // Connects `size` hosts, for a job with `nodes`.
  bool connect(int size, const std::string& nodes) {
    network_ = std::make_unique<Network>(size);
    secret_ = folder_.write("secret", std::string(32, 's'), 0600);
    nodes_ = nodes;
    return network_->works();
  }

  Launched start(int host, std::vector<std::string> arguments) {
    std::vector<std::string> all = {"--nnodes",      nodes_,  "--rdzv-endpoint", endpoint_,
                                    "--secret-file", secret_, "--max-restarts",  "5"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return network_->run(host, std::move(all));
  }

  // Starts two ranks on the host, which meet all others in the store and then stay until finish().
  Launched start_staying(int host, std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.end(), {"--nproc-per-node", "2", RANK_PROGRAM, go()});
    return start(host, std::move(arguments));
  }

  std::string go() const { return (folder_.path() / "go").string(); }
  void finish() const { folder_.write("go", ""); }

  // Waits until all ranks of the job have met in that generation, or in any with so many nodes.
  static void expect_formed(const Launched& job, int generation, int num_nodes) {
    expect_formed(job, num_nodes, std::to_string(generation) + " ");
  }
  static void expect_formed(const Launched& job, int num_nodes,
                            const std::string& generation = "") {
    const std::string words =
        "/" + std::to_string(num_nodes) + " flight=yes generation=" + generation;
    EXPECT_TRUE(job.says(words)) << words << "\n" << job.output() << job.error();
  }

  Folder folder_;
  std::string secret_, nodes_;
  std::string endpoint_ = Network::address(0) + ":29400";
  std::unique_ptr<Network> network_;
};

#define JOIN_OR_SKIP(size, nodes) \
  if (!connect(size, nodes))      \
  GTEST_SKIP() << "this process may not make network namespaces (needs root and 'ip')"

}  // namespace lockstep::launch::testing

// The mesh over real communicators: ranks are threads, connected by shared memory or TCP.
#include <exception>
#include <functional>
#include <numeric>
#include <thread>

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <lockstep/comm/backends/native/transport_communicator.h>
#include <lockstep/mesh/device_mesh.h>

namespace lockstep::mesh {
namespace {

using Group = std::shared_ptr<comm::Communicator>;

void run_world(int world_size, comm::Media media, const std::function<void(Group)>& body) {
  const auto secret = net::Secret::random();
  std::vector<std::shared_ptr<comm::Endpoint>> endpoints;
  std::vector<comm::EndpointAddress> addresses;
  comm::GroupInfo group{.global_ranks = std::vector<int>(static_cast<std::size_t>(world_size))};
  std::iota(group.global_ranks.begin(), group.global_ranks.end(), 0);
  for (int rank = 0; rank < world_size; ++rank) {
    endpoints.push_back(std::make_shared<comm::Endpoint>("127.0.0.1", secret));
    addresses.push_back(endpoints.back()->address());
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank, group]() mutable {
      try {
        group.rank = rank;
        body(comm::backends::make_transport_communicator(
            endpoints[static_cast<std::size_t>(rank)], group, "mesh-test", addresses,
            {.media = media, .timeout = milliseconds(30000)}));
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

class RunningMesh : public ::testing::TestWithParam<comm::Media> {};

// Every group sums over, and orders, exactly the ranks that the arithmetic says.
TEST_P(RunningMesh, GroupsCommunicateAmongTheirRanksOnly) {
  run_world(8, GetParam(), [](Group world) {
    DeviceMesh mesh(world, ParallelSizes{.pp = 2, .tp = 2}.axes());
    const auto check = [&](const Group& group, const std::vector<int>& ranks) {
      const at::Tensor mine = at::full({3}, world->rank(), at::kLong);
      at::Tensor lined_up = at::empty({3 * group->size()}, at::kLong);
      group->all_gather(lined_up, mine).wait();
      for (int position = 0; position < group->size(); ++position)
        EXPECT_EQ(lined_up[3 * position].item<std::int64_t>(),
                  ranks.at(static_cast<std::size_t>(position)));
      at::Tensor sum = mine.clone();
      group->all_reduce(sum).wait();
      EXPECT_EQ(sum[2].item<std::int64_t>(), std::accumulate(ranks.begin(), ranks.end(), 0));
    };
    for (const Axis& axis : mesh.shape().axes())
      check(mesh.axis(axis.name), mesh.ranks_of(axis.name));
    check(mesh.flatten({"dp_shard", "cp"}), mesh.ranks_of_joint({"dp_shard", "cp"}));
    check(mesh.flatten({"tp", "pp"}), mesh.ranks_of_joint({"pp", "tp"}));
  });
}

// Groups of one mesh do not wait for each other: only some ranks use some of them.
TEST_P(RunningMesh, GroupsAreIndependent) {
  run_world(4, GetParam(), [](Group world) {
    const DeviceMesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
    if (mesh.coordinate("dp_shard") == 0) mesh.axis("tp")->barrier().wait();
    if (mesh.coordinate("tp") == 1) mesh.axis("dp_shard")->barrier().wait();
    world->barrier().wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Media, RunningMesh,
                         ::testing::Values(comm::Media::automatic, comm::Media::tcp));

}  // namespace
}  // namespace lockstep::mesh

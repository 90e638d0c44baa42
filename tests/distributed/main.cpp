// The test program. With --rank it is one rank of a job that runs the table of manager.cpp, with
// --sharded that of sharded_manager.cpp, with --every-strategy that of every_strategy.cpp, with
// --tensor that of tensor_manager.cpp, with --stages that of stages_manager.cpp, with --scaled and
// a strategy that of scaled_loss.cpp, with --plain-tensor that of plain_tensor.cpp, with --waits
// that of waits.cpp.
#include <cstring>

#include <gtest/gtest.h>

#include "every_strategy.h"
#include "manager.h"
#include "plain_tensor.h"
#include "scaled_loss.h"
#include "sharded_manager.h"
#include "stages_manager.h"
#include "tensor_manager.h"
#include "waits.h"

namespace {

lockstep::ShardingStrategy strategy_named(const std::string& name) {
  using enum lockstep::ShardingStrategy;
  if (name == "NO_SHARD") return NO_SHARD;
  if (name == "SHARD_OPTIMIZER") return SHARD_OPTIMIZER;
  return name == "SHARD_GRAD_OP" ? SHARD_GRAD_OP : FULL_SHARD;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0) {
    const auto dist = lockstep::setup_distributed(
        {.timeout = lockstep::milliseconds(30'000), .device_type = c10::DeviceType::CPU});
    return lockstep::ranks::run_cells(
        dist.world(), [&](lockstep::ranks::Cells& cells) { check_manager(dist, cells); });
  }
  if (argc == 2 && std::strcmp(argv[1], "--sharded") == 0) {
    const auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP,
                                                   .timeout = lockstep::milliseconds(30'000),
                                                   .device_type = c10::DeviceType::CPU});
    return lockstep::ranks::run_cells(
        dist.world(), [&](lockstep::ranks::Cells& cells) { check_sharded_manager(dist, cells); });
  }
  if (argc == 2 && std::strcmp(argv[1], "--tensor") == 0) {
    const auto dist = lockstep::setup_distributed({.model_parallel = {.tensor = 2},
                                                   .timeout = lockstep::milliseconds(30'000),
                                                   .device_type = c10::DeviceType::CPU});
    return lockstep::ranks::run_cells(
        dist.world(), [&](lockstep::ranks::Cells& cells) { check_tensor_manager(dist, cells); });
  }
  if (argc == 2 && std::strcmp(argv[1], "--stages") == 0) {
    const auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::PIPELINE,
                                                   .timeout = lockstep::milliseconds(30'000),
                                                   .device_type = c10::DeviceType::CPU});
    return lockstep::ranks::run_cells(
        dist.world(), [&](lockstep::ranks::Cells& cells) { check_stages_manager(dist, cells); });
  }
  if (argc == 2 && std::strcmp(argv[1], "--every-strategy") == 0)
    return lockstep::ranks::run_cells(lockstep::check_every_strategy);
  if (argc == 2 && std::strcmp(argv[1], "--plain-tensor") == 0)
    return lockstep::ranks::run_cells(lockstep::check_plain_tensor);
  if (argc == 2 && std::strcmp(argv[1], "--waits") == 0)
    return lockstep::ranks::run_cells(lockstep::check_waits);
  if (argc == 3 && std::strcmp(argv[1], "--scaled") == 0) {
    const auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP,
                                                   .sharding_strategy = strategy_named(argv[2]),
                                                   .timeout = lockstep::milliseconds(30'000),
                                                   .device_type = c10::DeviceType::CPU});
    return lockstep::ranks::run_cells(
        dist.world(), [&](lockstep::ranks::Cells& cells) { check_scaled_loss(dist, cells); });
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

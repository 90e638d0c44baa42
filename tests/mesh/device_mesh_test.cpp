#include <lockstep/mesh/device_mesh.h>

#include <atomic>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

#include "../base/errors.h"
#include "thread_group.h"

namespace lockstep::mesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::ThreadGroup;
using World = std::shared_ptr<ThreadGroup>;

const std::vector<Axis> kAxes = {{"pp", 2}, {"dp_shard", 2}, {"cp", 1}, {"tp", -1}};

TEST(DeviceMesh, EachAxisIsTheGroupThatTheShapeSays) {
  run_ranks(12, [](World world) {
    const DeviceMesh mesh(world, kAxes);
    EXPECT_EQ(mesh.size("tp"), 3);
    for (const Axis& axis : mesh.shape().axes()) {
      const auto& group = mesh.axis(axis.name);
      EXPECT_EQ(group->size(), axis.size);
      EXPECT_EQ(group->rank(), mesh.coordinate(axis.name));
      EXPECT_EQ(group->global_ranks(), mesh.ranks_of(axis.name));
      EXPECT_EQ(group->name(), mesh.shape().group_name(world->rank(), {axis.name}));
    }
  });
}

TEST(DeviceMesh, Example) {
  run_ranks(12, [](World world) {
    const DeviceMesh mesh(world, kAxes);
    if (world->rank() != 7) return;
    EXPECT_THAT(mesh.coordinates(), ElementsAre(1, 0, 0, 1));
    EXPECT_EQ(mesh.axis("tp")->name(), "tp[pp=1,dp_shard=0]");
    EXPECT_THAT(mesh.axis("tp")->global_ranks(), ElementsAre(6, 7, 8));
    EXPECT_THAT(mesh.axis("pp")->global_ranks(), ElementsAre(1, 7));
  });
}

TEST(DeviceMesh, FlattenIsMadeOnceInMeshOrder) {
  run_ranks(12, [](World world) {
    DeviceMesh mesh(world, kAxes);
    const int before = world->num_splits();
    const auto joint = mesh.flatten({"tp", "dp_shard"});
    EXPECT_EQ(joint->size(), 6);
    EXPECT_EQ(joint->global_ranks(), mesh.ranks_of_joint({"dp_shard", "tp"}));
    EXPECT_EQ(joint->rank(), mesh.coordinate("dp_shard") * 3 + mesh.coordinate("tp"));
    EXPECT_EQ(mesh.flatten({"dp_shard", "tp"}), joint);
    EXPECT_EQ(world->num_splits(), before + 1);
    // An axis by itself has a group already.
    EXPECT_EQ(mesh.flatten({"tp"}), mesh.axis("tp"));
  });
}

TEST(DeviceMesh, GroupsOfTheSameRanksAreApart) {
  run_ranks(2, [](World world) {
    DeviceMesh mesh(world, {{"dp_shard", 2}, {"cp", 1}}, {.flatten = {{"dp_shard", "cp"}}});
    const auto& joint = mesh.flatten({"dp_shard", "cp"});
    EXPECT_NE(joint, mesh.axis("dp_shard"));
    EXPECT_NE(mesh.axis("dp_shard"), mesh.world());
    EXPECT_EQ(joint->global_ranks(), mesh.axis("dp_shard")->global_ranks());
    EXPECT_EQ(mesh.axis("cp")->size(), 1);
  });
}

// Only rank 0 asks: nothing is sent, so nothing can hang.
TEST(DeviceMesh, WhatIsMadeAtOnceNeedsNobodyElse) {
  run_ranks(4, [](World world) {
    DeviceMesh mesh(world, {{"dp_shard", 2}, {"tp", 2}}, {.flatten = {{"tp", "dp_shard"}}});
    if (world->rank() != 0) return;
    const int before = world->num_splits();
    EXPECT_EQ(mesh.axis("tp")->size(), 2);
    EXPECT_EQ(mesh.flatten({"dp_shard", "tp"})->size(), 4);
    EXPECT_EQ(world->num_splits(), before);
  });
}

// Only some ranks ask for a group that has not been made: they get an error that names the others.
TEST(DeviceMesh, FlattenBySomeNamesTheOthers) {
  std::atomic<int> named{0};
  run_ranks(4, [&](World world) {
    DeviceMesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
    if (world->rank() >= 2) return;
    world->set_timeout(milliseconds(200));
    try {
      mesh.flatten({"dp_shard", "tp"});
    } catch (const CommError& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(2, 3));
      ++named;
    }
  });
  EXPECT_EQ(named, 2);
}

TEST(DeviceMesh, MistakesAreFoundBeforeAnythingIsSent) {
  run_ranks(8, [](World world) {
    EXPECT_THAT(usage_error([&] {
                  DeviceMesh(world, {{"dp_shard", 4}, {"tp", 3}});
                }),
                HasSubstr("dp_shard 4 × tp 3 = 12 but the world has 8 ranks"));
    EXPECT_THAT(usage_error([&] {
                  DeviceMesh(world, {{"tp", 8}}, {.flatten = {{"tp", "ep"}}});
                }),
                AllOf(HasSubstr("no axis 'ep'"), HasSubstr("tp 8")));
    EXPECT_EQ(world->num_splits(), 0);
  });
  EXPECT_THAT(usage_error([] { DeviceMesh(nullptr, {{"tp", 1}}); }), HasSubstr("null"));
}

TEST(DeviceMesh, UnknownAxis) {
  run_ranks(2, [](World world) {
    DeviceMesh mesh(world, {{"tp", 2}});
    const auto names_axes = AllOf(HasSubstr("no axis 'dp'"), HasSubstr("tp 2"));
    EXPECT_THAT(usage_error([&] { mesh.axis("dp"); }), names_axes);
    EXPECT_THAT(usage_error([&] { mesh.flatten({"tp", "dp"}); }), names_axes);
    EXPECT_THAT(usage_error([&] { mesh.size("dp"); }), names_axes);
  });
}

TEST(DeviceMesh, GenerationIsTheWorlds) {
  run_ranks(
      2,
      [](World world) {
        const DeviceMesh mesh(world, {{"tp", 2}});
        EXPECT_EQ(mesh.generation(), 3u);
        EXPECT_EQ(mesh.axis("tp")->generation(), 3u);
      },
      milliseconds(20000), 3);
}

TEST(DeviceMesh, LongNamesAreShortened) {
  run_ranks(2, [](World world) {
    const std::string a(100, 'a');
    const std::string b(100, 'b');
    const DeviceMesh mesh(world, {{a, 1}, {b, 2}}, {.flatten = {{a, b}}});
    EXPECT_EQ(mesh.axis(b)->size(), 2);
  });
}

}  // namespace
}  // namespace lockstep::mesh

#include <lockstep/mesh/placement/mesh_shape.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

#include "../base/errors.h"

namespace lockstep::mesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(MeshShape, FillsInTheRest) {
  const MeshShape mesh(ParallelSizes{.pp = 2, .tp = 4}.axes(), 24);
  EXPECT_EQ(mesh.size("dp_shard"), 3);
  EXPECT_EQ(mesh.text(), "pp 2 × dp_replicate 1 × dp_shard 3 × cp 1 × tp 4");
  EXPECT_EQ(MeshShape({{"all", -1}}, 5).size("all"), 5);
  EXPECT_EQ(MeshShape({{"a", 5}, {"b", -1}}, 5).size("b"), 1);
  EXPECT_EQ(MeshShape({}, 1).world_size(), 1);
}

TEST(MeshShape, SizesMustMultiplyToTheWorld) {
  EXPECT_THAT(usage_error([] {
                MeshShape({{"dp_shard", 4}, {"tp", 3}}, 8);
              }),
              HasSubstr("dp_shard 4 × tp 3 = 12 but the world has 8 ranks: "));
  EXPECT_THAT(usage_error([] {
                MeshShape({{"dp_shard", -1}, {"tp", 3}}, 8);
              }),
              AllOf(HasSubstr("tp 3 = 3 does not divide the world's 8 ranks"),
                    HasSubstr("'dp_shard' (-1)")));
  EXPECT_THAT(usage_error([] {
                MeshShape({{"dp_shard", -1}, {"tp", 16}}, 8);
              }),
              HasSubstr("tp 16 = 16 does not divide"));
  EXPECT_THAT(usage_error([] {
                MeshShape({{"a", 1 << 30}, {"b", 1 << 30}, {"c", 1 << 30}}, 8);
              }),
              HasSubstr("but the world has 8 ranks"));
  EXPECT_THAT(usage_error([] { MeshShape({}, 2); }), HasSubstr("no axes = 1 but the world has 2"));
}

TEST(MeshShape, BadAxes) {
  EXPECT_THAT(usage_error([] { MeshShape({{"a", -1}, {"b", -1}}, 8); }), HasSubstr("both -1"));
  EXPECT_THAT(usage_error([] { MeshShape({{"a", 0}}, 8); }), HasSubstr("axis 'a' has size 0"));
  EXPECT_THAT(usage_error([] { MeshShape({{"a", -2}}, 8); }), HasSubstr("axis 'a' has size -2"));
  EXPECT_THAT(usage_error([] { MeshShape({{"a", 2}, {"a", 4}}, 8); }), HasSubstr("named twice"));
  EXPECT_THAT(usage_error([] { MeshShape({{"a b", 8}}, 8); }), HasSubstr("'a b' is no name"));
  EXPECT_THAT(usage_error([] { MeshShape({{"", 8}}, 8); }), HasSubstr("'' is no name"));
  EXPECT_THAT(usage_error([] { MeshShape({{"a", 1}}, 0); }), HasSubstr("world of 0"));
}

TEST(MeshShape, UnknownAxisListsTheAxes) {
  const MeshShape mesh({{"dp_shard", 4}, {"tp", 2}}, 8);
  EXPECT_THAT(usage_error([&] { mesh.size("sp"); }),
              AllOf(HasSubstr("no axis 'sp'"), HasSubstr("dp_shard 4 × tp 2")));
  EXPECT_THAT(usage_error([&] { mesh.group_of(0, {"tp", "ep"}); }), HasSubstr("no axis 'ep'"));
  EXPECT_THAT(usage_error([&] { mesh.group_of(0, {"tp", "tp"}); }), HasSubstr("named twice"));
  EXPECT_THAT(usage_error([&] { mesh.group_of(0, {}); }), HasSubstr("no axis was named"));
  EXPECT_THAT(usage_error([&] { mesh.coordinates(8); }), HasSubstr("rank 8 of a mesh of 8"));
  EXPECT_THAT(usage_error([&] {
                mesh.rank_at({4, 0});
              }),
              HasSubstr("position 4 on axis 'dp_shard'"));
  EXPECT_THAT(usage_error([&] { mesh.rank_at({4}); }), HasSubstr("1 coordinates"));
}

TEST(MeshShape, Example) {
  const MeshShape mesh({{"pp", 2}, {"dp_shard", 2}, {"cp", 1}, {"tp", 2}}, 8);
  EXPECT_THAT(mesh.coordinates(6), ElementsAre(1, 1, 0, 0));
  EXPECT_THAT(mesh.group_of(6, {"tp"}), ElementsAre(6, 7));
  EXPECT_THAT(mesh.group_of(6, {"pp"}), ElementsAre(2, 6));
  EXPECT_THAT(mesh.group_of(6, {"tp", "pp"}), ElementsAre(2, 3, 6, 7));
  EXPECT_EQ(mesh.group_name(6, {"tp"}), "tp[pp=1,dp_shard=1]");
  EXPECT_EQ(mesh.group_name(6, {"cp", "dp_shard"}), "dp_shard*cp[pp=1,tp=0]");
  EXPECT_EQ(mesh.group_name(6, {"pp", "dp_shard", "tp"}), "pp*dp_shard*tp");
}

TEST(MeshShape, GroupsPartitionTheWorld) {
  std::mt19937 random(7);
  for (int round = 0; round < 120; ++round) {
    std::vector<Axis> axes;
    int world_size = 1;
    for (unsigned i = 0, count = 1 + random() % 4; i < count; ++i) {
      axes.push_back({"axis" + std::to_string(i), static_cast<int>(1 + random() % 4)});
      world_size *= axes.back().size;
    }
    // Any one of the sizes may be left open.
    const std::vector<Axis> expected = axes;
    axes[random() % axes.size()].size = -1;
    const MeshShape mesh(axes, world_size);
    ASSERT_EQ(mesh.axes(), expected);

    std::vector<std::string> names;
    for (const Axis& axis : axes)
      if (random() % 2 == 0) names.push_back(axis.name);
    if (names.empty()) names.push_back(axes[0].name);
    std::vector<std::string> shuffled = names;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    ASSERT_EQ(mesh.in_mesh_order(shuffled), names);

    std::set<std::string> group_names;
    std::set<int> group_numbers;
    for (int rank = 0; rank < world_size; ++rank) {
      ASSERT_EQ(mesh.rank_at(mesh.coordinates(rank)), rank);
      const std::vector<int> group = mesh.group_of(rank, shuffled);
      ASSERT_EQ(static_cast<int>(group.size()), mesh.group_size(names));
      ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
      ASSERT_EQ(group.at(static_cast<std::size_t>(mesh.position_in_group(rank, shuffled))), rank);
      group_names.insert(mesh.group_name(rank, shuffled));
      group_numbers.insert(mesh.group_number(rank, shuffled));
      for (int other = 0; other < world_size; ++other) {
        // Two ranks are in one group exactly if all their other coordinates agree; all members
        // agree on the group.
        bool together = true;
        for (const Axis& axis : axes)
          if (std::find(names.begin(), names.end(), axis.name) == names.end())
            together =
                together && mesh.coordinate(rank, axis.name) == mesh.coordinate(other, axis.name);
        ASSERT_EQ(std::find(group.begin(), group.end(), other) != group.end(), together);
        ASSERT_EQ(mesh.group_number(rank, names) == mesh.group_number(other, names), together);
        ASSERT_EQ(mesh.group_name(rank, names) == mesh.group_name(other, names), together);
        if (together) {
          ASSERT_EQ(mesh.group_of(other, names), group);
        }
      }
    }
    const auto num_groups = static_cast<std::size_t>(world_size / mesh.group_size(names));
    ASSERT_EQ(group_names.size(), num_groups);
    ASSERT_EQ(*group_numbers.rbegin(), static_cast<int>(num_groups) - 1);
  }
}

}  // namespace
}  // namespace lockstep::mesh

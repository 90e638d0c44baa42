#include <gtest/gtest.h>

#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::shard {
namespace {

using mesh::Interval;

TEST(FlatLayout, CutsAcrossParameters) {
  const std::int64_t sizes[] = {20, 0, 25, 2};
  const FlatLayout layout(sizes, 3);
  EXPECT_EQ(layout.num_members(), 4u);
  EXPECT_EQ(layout.num_elements(), 47);
  EXPECT_EQ(layout.part_size(), 16);
  EXPECT_EQ(layout.num_padded(), 48);
  EXPECT_EQ(layout.range(2), (Interval{20, 45}));
  EXPECT_EQ(layout.piece(0, 0), (Interval{0, 16}));
  EXPECT_EQ(layout.piece(0, 1), (Interval{16, 20}));
  EXPECT_EQ(layout.piece(0, 2).size(), 0);
  EXPECT_EQ(layout.piece(1, 1).size(), 0);
  EXPECT_EQ(layout.piece(2, 1), (Interval{0, 12}));
  EXPECT_EQ(layout.piece_offset(2, 1), 4);
  EXPECT_EQ(layout.piece(2, 2), (Interval{12, 25}));
  EXPECT_EQ(layout.piece_offset(2, 2), 0);
  EXPECT_EQ(layout.piece(3, 2), (Interval{0, 2}));
  EXPECT_EQ(layout.piece_offset(3, 2), 13);
}

// Whatever the sizes, each element is on one rank, where its part and its piece agree on its place.
TEST(FlatLayout, EveryElementHasOnePlace) {
  const std::vector<std::vector<std::int64_t>> cases = {
      {1}, {3, 1, 4, 1, 5, 9, 2, 6}, {1, 1, 1}, {0, 0, 1}, {17, 0, 0, 1}, {64, 64}, {0}, {}};
  for (const auto& sizes : cases)
    for (const int num_ranks : {1, 2, 3, 5, 8, 100}) {
      const FlatLayout layout(sizes, num_ranks);
      EXPECT_EQ(layout.num_padded(), layout.part_size() * num_ranks);
      EXPECT_GE(layout.num_padded(), layout.num_elements());
      EXPECT_LT(layout.num_padded(), layout.num_elements() + num_ranks * kPartAlignment);
      std::int64_t begin = 0;
      for (std::size_t member = 0; member < sizes.size(); ++member) {
        EXPECT_EQ(layout.range(member), (Interval{begin, begin + sizes[member]}));
        std::int64_t next = 0;
        for (int rank = 0; rank < num_ranks; ++rank) {
          const Interval piece = layout.piece(member, rank);
          ASSERT_GE(piece.size(), 0);
          if (piece.size() == 0) continue;
          EXPECT_EQ(piece.begin, next);
          next = piece.end;
          const std::int64_t offset = layout.piece_offset(member, rank);
          EXPECT_EQ(layout.part(rank).begin + offset, begin + piece.begin);
          EXPECT_LE(offset + piece.size(), layout.part_size());
        }
        EXPECT_EQ(next, sizes[member]);
        begin += sizes[member];
      }
      EXPECT_EQ(layout.num_elements(), begin);
    }
}

// An empty piece can still be cut out of the part.
TEST(FlatLayout, EmptyPiecesLieInsideOfThePart) {
  const std::int64_t sizes[] = {2, 0, 9, 1};
  for (const int num_ranks : {2, 3, 7, 20}) {
    const FlatLayout layout(sizes, num_ranks);
    for (std::size_t member = 0; member < 4; ++member)
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::int64_t offset = layout.piece_offset(member, rank);
        EXPECT_GE(offset, 0);
        EXPECT_LE(offset + layout.piece(member, rank).size(), layout.part_size());
      }
  }
}

}  // namespace
}  // namespace lockstep::shard

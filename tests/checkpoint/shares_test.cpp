// The shares that ranks write: every element is written once, and each rank writes about as much.
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/piece_file.h>

namespace lockstep::checkpoint {
namespace {

using mesh::Placement;
using Ranks = std::vector<std::vector<HeldPiece>>;

HeldPiece piece(const std::string& tensor, const Placement& placement, DType dtype = DType::f32) {
  return {tensor, dtype, placement.shape(), placement};
}

std::vector<std::uint64_t> bytes_of(const Ranks& ranks) {
  std::vector<std::uint64_t> bytes;
  const auto written = share_out(ranks);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    bytes.push_back(0);
    for (const WrittenPart& part : written[rank])
      bytes.back() += static_cast<std::uint64_t>(part.part.size()) *
                      (bits_of(ranks[rank][part.piece].dtype) / 8);
  }
  return bytes;
}

// How often each element of a tensor is written.
std::vector<int> times(const Ranks& ranks, const std::string& tensor, std::int64_t elements) {
  std::vector<int> counts(static_cast<std::size_t>(elements));
  const auto written = share_out(ranks);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (const WrittenPart& part : written[rank]) {
      const HeldPiece& piece = ranks[rank][part.piece];
      if (piece.tensor != tensor) continue;
      for (std::int64_t i = part.part.begin; i < part.part.end; ++i)
        ++counts[static_cast<std::size_t>(piece.placement.logical_index(i))];
    }
  return counts;
}

TEST(Shares, CopiesAreWrittenOnceAndTheWorkIsShared) {
  std::vector<HeldPiece> all;
  for (int i = 0; i < 20; ++i)
    all.push_back(piece("t" + std::to_string(i), Placement::full({10 + i})));
  const Ranks ranks(4, all);
  for (int i = 0; i < 20; ++i)
    EXPECT_THAT(times(ranks, "t" + std::to_string(i), 10 + i), ::testing::Each(1));
  const auto bytes = bytes_of(ranks);
  const std::uint64_t total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  for (const std::uint64_t mine : bytes) EXPECT_LE(mine, total / 4 + 4 * 29);
}

TEST(Shares, ALargePieceIsWrittenBySeveral) {
  const Ranks ranks(4, {piece("large", Placement::full({100, 100})),
                        piece("small", Placement::full({3}), DType::i64)});
  EXPECT_THAT(times(ranks, "large", 10'000), ::testing::Each(1));
  EXPECT_THAT(times(ranks, "small", 3), ::testing::Each(1));
  for (const std::uint64_t bytes : bytes_of(ranks)) EXPECT_LE(bytes, 10'000u * 4 / 4 + 100);
}

TEST(Shares, PartsAreWrittenByThoseWhoHaveThem) {
  Ranks ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back({piece("cut", Placement::full({11}).cut_flat(rank, 4)),
                     // With hybrid sharding, two ranks have the same half.
                     piece("half", Placement::full({6, 2}).cut_dim(0, rank / 2, 2)),
                     piece("empty", Placement::full({0}))});
  EXPECT_THAT(times(ranks, "cut", 11), ::testing::Each(1));
  EXPECT_THAT(times(ranks, "half", 12), ::testing::Each(1));
  int mentions = 0;
  for (const auto& of_rank : share_out(ranks))
    for (const WrittenPart& part : of_rank) mentions += part.piece == 2 ? 1 : 0;
  EXPECT_EQ(mentions, 1) << "of a tensor without elements, which is there all the same";
}

TEST(Shares, AreToldInTexts) {
  const std::vector<HeldPiece> pieces = {
      piece("a name with \"quotes\"", Placement::full({4, 6}).cut_dim(1, 1, 2).cut_flat(0, 3)),
      piece("scalar", Placement::full({}), DType::i64),
      {"cut as three", DType::bf16, {6, 4}, Placement::full({3, 2, 4}).cut_dim(1, 0, 2)},
      piece("empty", Placement::full({3}).cut_flat(mesh::Interval{3, 3}))};
  EXPECT_EQ(parse_held_pieces(to_text(pieces)), pieces);
}

TEST(Shares, WhatARankWritesIsPiecesOfItsOwn) {
  const std::vector<HeldPiece> held = {piece("a", Placement::full({4, 6}).cut_dim(1, 1, 2)),
                                       piece("b", Placement::full({5}), DType::f64)};
  const std::vector<WrittenPart> parts = {{.piece = 0, .part = {3, 9}},
                                          {.piece = 1, .part = {0, 5}}};
  const auto written = written_pieces(held, parts);
  ASSERT_EQ(written.size(), 2u);
  EXPECT_EQ(written[0],
            piece("a", Placement::full({4, 6}).cut_dim(1, 1, 2).cut_flat(mesh::Interval{3, 9})));
  EXPECT_EQ(written[0].bytes(), 6u * 4);
  EXPECT_EQ(written[1], held[1]);
  EXPECT_EQ(written[1].bytes(), 5u * 8);
}

}  // namespace
}  // namespace lockstep::checkpoint

#include <lockstep/data/dataset.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/files.h"
#include "datasets.h"
#include "token_files.h"

namespace lockstep::data {
namespace {

TEST(TokenDataset, GivesInputsAndTheSameShiftedByOne) {
  const lockstep::testing::TemporaryFolder folder;
  std::vector<std::uint16_t> tokens(50);
  std::iota(tokens.begin(), tokens.end(), 1000);
  lockstep::testing::write_file(folder / "t.bin", bytes_of(tokens));
  const TokenDataset dataset(SequenceSet(
      std::make_shared<TokenStream>(TokenStream::open(std::vector{folder / "t.bin"})), 6));
  ASSERT_EQ(dataset.size(), 8);
  const std::vector<std::int64_t> indices = {7, 0, 3};
  const Batch batch = dataset.batch(indices);
  EXPECT_EQ(batch.size(), 3);
  for (const at::Tensor& tensor : {batch.input, batch.target}) {
    EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{3, 6}));
    EXPECT_EQ(tensor.scalar_type(), at::kLong);
    EXPECT_TRUE(tensor.is_contiguous());
  }
  for (std::size_t row = 0; row < indices.size(); ++row) {
    const auto dim = static_cast<std::int64_t>(row);
    EXPECT_EQ(values(batch.input.select(0, dim)), count_up(6, 1000 + indices[row] * 6));
    EXPECT_EQ(values(batch.target.select(0, dim)), count_up(6, 1001 + indices[row] * 6));
  }
}

}  // namespace
}  // namespace lockstep::data

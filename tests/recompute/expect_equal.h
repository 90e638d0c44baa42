#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep {

using Tensors = std::vector<at::Tensor>;

inline void expect_equal(const Tensors& expected, const Tensors& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(expected[i].equal(found[i])) << i;
}

}  // namespace lockstep

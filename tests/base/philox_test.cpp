#include <gtest/gtest.h>

#include <lockstep/base/philox.h>

namespace lockstep {
namespace {

// The known answers that the algorithm's authors publish.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox::words(0, 0, 0),
            (Philox::Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox::words(~0ull, ~0ull, ~0ull),
            (Philox::Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox::words(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull),
            (Philox::Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformStaysBelowOne) {
  EXPECT_EQ(Philox::uniform(0), 0.0f);
  EXPECT_LT(Philox::uniform(~0u), 1.0f);
}

}  // namespace
}  // namespace lockstep

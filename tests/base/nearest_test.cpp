#include <gtest/gtest.h>

#include <lockstep/base/text.h>

namespace lockstep {
namespace {

TEST(Nearest, IsTheWordThatWasMeant) {
  const std::string_view known[] = {"run", "check", "bench"};
  EXPECT_EQ(did_you_mean("rnu", known), ": did you mean 'run'?");
  EXPECT_EQ(did_you_mean("chekc", known), ": did you mean 'check'?");
  EXPECT_EQ(did_you_mean("something-else", known), "");
}

}  // namespace
}  // namespace lockstep

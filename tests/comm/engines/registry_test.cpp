#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/engines/engines.h>

#include "ranks.h"

namespace lockstep::comm::engines {
namespace {

using testing::HasSubstr;

std::string complaint(const std::string& name) {
  try {
    make_engine(name, group_info("world", 0, 1), {});
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Registry, ListsWhatThereIs) {
  const auto names = available_engines();
  EXPECT_THAT(complaint("ucc"), HasSubstr("there is no engine 'ucc'"));
  for (const std::string& name : names) EXPECT_THAT(complaint("ucc"), HasSubstr(name));
  for (const std::string name : {"gloo", "mpi", "nccl"}) {
    if (testing::Value(names, testing::Contains(name))) continue;
    EXPECT_THAT(complaint(name), HasSubstr("not in this build"));
  }
}

}  // namespace
}  // namespace lockstep::comm::engines

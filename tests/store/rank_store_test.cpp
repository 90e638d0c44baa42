#include <lockstep/store/server.h>

#include <future>

#include "fixture.h"

namespace lockstep::store {
namespace {

using testing::HasSubstr;

class RankStoreTest : public StoreTest {
 protected:
  std::unique_ptr<RankStore> rank(std::unique_ptr<Server> server = nullptr) {
    return std::make_unique<RankStore>(address_, secret_, std::move(server), 2, soon());
  }

  const net::Address address_ = server_->address();
};

TEST_F(RankStoreTest, LastsUntilTheOtherRankIsDone) {
  auto host = rank(std::move(server_));
  auto guest = rank();
  host->set("why", "the disk is full", soon());
  const auto ended = std::async(std::launch::async, [&] { host.reset(); });
  // The host is leaving, and the store still works.
  guest->wait({"lockstep/ranks-done-with-the-store"}, soon());
  EXPECT_EQ(guest->get("why", soon()), "the disk is full");
  EXPECT_EQ(ended.wait_for(milliseconds(0)), std::future_status::timeout);
  guest.reset();
  ended.wait();
}

TEST_F(RankStoreTest, SaysNothingWhereTheHostIsLast) {
  auto host = rank(std::move(server_));
  rank().reset();
  testing::internal::CaptureStderr();
  host.reset();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(RankStoreTest, SaysWhoLosesIt) {
  auto host = rank(std::move(server_));
  auto guest = rank();
  testing::internal::CaptureStderr();
  host.reset();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("1 of 2 ranks have not left the store"));
}

}  // namespace
}  // namespace lockstep::store

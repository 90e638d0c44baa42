// The store without its sockets, at times that the test chooses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/store/table.h>

namespace lockstep::store {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

class TableTest : public testing::Test {
 protected:
  std::vector<Answer> apply(Ticket ticket, Request request, const std::string& client = "c") {
    if (request.number == 0) request.number = request.answered = ++number_;
    std::vector<Answer> answers;
    table_.apply(ticket, client, std::move(request), start_, answers);
    return answers;
  }
  std::vector<Answer> set(const std::string& key, const std::string& value = "v") {
    return apply(99, {.op = Op::set, .keys = {key}, .value = value});
  }
  std::vector<Answer> expire(Clock::time_point now) {
    std::vector<Answer> answers;
    table_.expire(now, answers);
    return answers;
  }

  const Clock::time_point start_ = Clock::now();
  std::uint64_t number_ = 0;
  Table table_{10000};
};

TEST_F(TableTest, WaitsExpireInOrderAndOnTime) {
  EXPECT_EQ(table_.next_expiry(), std::nullopt);
  EXPECT_THAT(apply(1, {.op = Op::wait, .keys = {"a", "b"}, .patience_ms = 3000}), IsEmpty());
  EXPECT_THAT(apply(2, {.op = Op::watch, .keys = {"a"}, .patience_ms = 1000}), IsEmpty());
  EXPECT_THAT(apply(3, {.op = Op::wait, .keys = {"z"}, .patience_ms = ~0ull}), IsEmpty());
  EXPECT_EQ(table_.next_expiry(), start_ + seconds(1));
  EXPECT_THAT(expire(start_ + milliseconds(999)), IsEmpty());
  auto expired = expire(start_ + seconds(1));
  ASSERT_THAT(expired, SizeIs(1));
  EXPECT_EQ(expired[0].ticket, 2u);
  EXPECT_EQ(expired[0].reply.status, Status::timeout);
  EXPECT_EQ(table_.next_expiry(), start_ + seconds(3));

  EXPECT_THAT(set("a"), SizeIs(1));  // only the setter's own answer
  expired = expire(start_ + seconds(5));
  ASSERT_THAT(expired, SizeIs(1));
  EXPECT_EQ(expired[0].ticket, 1u);
  EXPECT_THAT(expired[0].reply.values, ElementsAre("b"));
  EXPECT_EQ(table_.num_waiting(), 1u);
}

TEST_F(TableTest, CancelledWaitsGetNoAnswer) {
  apply(1, {.op = Op::wait, .keys = {"a"}, .patience_ms = 1000});
  apply(2, {.op = Op::wait, .keys = {"a"}, .patience_ms = 1000});
  table_.cancel(1);
  table_.cancel(7);
  const auto answers = set("a");
  ASSERT_THAT(answers, SizeIs(2));
  EXPECT_EQ(answers[0].ticket, 99u);
  EXPECT_EQ(answers[1].ticket, 2u);
  EXPECT_EQ(table_.num_waiting(), 0u);
  EXPECT_EQ(table_.next_expiry(), std::nullopt);
  EXPECT_THAT(expire(start_ + seconds(5)), IsEmpty());
}

TEST_F(TableTest, MemoryIsGivenBack) {
  EXPECT_EQ(table_.held_bytes(), 0u);
  set("a", std::string(1000, 'x'));
  const auto one = table_.held_bytes();
  EXPECT_GE(one, 1001u);
  set("a", std::string(500, 'x'));
  EXPECT_EQ(table_.held_bytes(), one - 500);
  apply(1, {.op = Op::remove, .keys = {"a"}});
  EXPECT_EQ(table_.held_bytes(), 0u);
}

TEST_F(TableTest, ManyTinyKeysFillItToo) {
  int kept = 0;
  while (set("key " + std::to_string(kept), "")[0].reply.status == Status::ok) ++kept;
  EXPECT_LT(kept, 200);
  EXPECT_LE(table_.held_bytes(), 10000u);
}

TEST_F(TableTest, ARepeatGetsTheFirstAnswerAndALateOneNone) {
  const Request add{.op = Op::add, .number = 5, .answered = 5, .keys = {"n"}, .amount = 1};
  EXPECT_EQ(apply(1, add)[0].reply.number, 1);
  EXPECT_EQ(apply(2, add)[0].reply.number, 1);
  EXPECT_EQ(apply(3, add, "another client")[0].reply.number, 2);
  Request next = add;
  next.number = next.answered = 6;
  EXPECT_EQ(apply(2, next)[0].reply.number, 3);
  EXPECT_THAT(apply(1, add), IsEmpty());
  EXPECT_THAT(apply(4, {.op = Op::get, .keys = {"n"}})[0].reply.values, ElementsAre("3"));
}

TEST_F(TableTest, ACompareAndSetThatFailedMayBeThoughtOver) {
  const Request swap{
      .op = Op::compare_and_set, .number = 5, .keys = {"a"}, .value = "mine", .expected = "free"};
  EXPECT_EQ(apply(1, swap)[0].reply.status, Status::different);
  apply(2, {.op = Op::set, .number = 1, .keys = {"a"}, .value = "free"}, "another client");
  EXPECT_EQ(apply(1, swap)[0].reply.status, Status::ok);
  EXPECT_EQ(apply(1, swap)[0].reply.status, Status::ok);
}

TEST(Repeats, ForgetsTheClientThatWasSilentLongest) {
  Repeats repeats;
  const auto name = [](std::size_t i) { return "client " + std::to_string(i); };
  for (std::size_t i = 0; i < Repeats::kMostClients; ++i) {
    repeats.look_up(name(i), 1, 1);
    repeats.remember(name(i), 1, 10);
  }
  EXPECT_EQ(repeats.look_up(name(0), 1, 1).kind, Repeats::Kind::repeated);
  repeats.look_up("one more", 1, 1);
  EXPECT_EQ(repeats.look_up(name(0), 1, 1).kind, Repeats::Kind::repeated);
  EXPECT_EQ(repeats.look_up(name(1), 1, 1).kind, Repeats::Kind::fresh);
}

TEST(Repeats, HoldsABoundedNumberOfCalls) {
  Repeats repeats;
  for (std::uint64_t call = 1; call <= Repeats::kMostCalls + 1; ++call) {
    repeats.look_up("c", call, 1);
    repeats.remember("c", call, static_cast<std::int64_t>(call));
  }
  EXPECT_EQ(repeats.look_up("c", 1, 1).kind, Repeats::Kind::fresh);
  EXPECT_EQ(repeats.look_up("c", 2, 1).kind, Repeats::Kind::repeated);
  EXPECT_EQ(repeats.look_up("c", 2, 1).result, 2);
}

}  // namespace
}  // namespace lockstep::store

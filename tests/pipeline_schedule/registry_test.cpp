// Schedules that a program adds to the table.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/registry.h>

#include "tests/base/errors.h"

namespace lockstep::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// All forwards, then all backwards, the last micro-batch first.
Order last_in_first_out(const ScheduleSize& size) {
  Order order(static_cast<std::size_t>(size.num_ranks));
  for (int rank = 0; rank < size.num_ranks; ++rank) {
    auto& actions = order[static_cast<std::size_t>(rank)];
    for (int i = 0; i < size.num_micro_batches; ++i)
      actions.push_back({ActionKind::forward, rank, i});
    for (int i = size.num_micro_batches; i-- > 0;)
      actions.push_back({ActionKind::backward, rank, i});
  }
  return order;
}

TEST(ScheduleRegistry, MakesScheduleOfARegisteredOrder) {
  const ScheduleKind kind = register_schedule({.name = "lifo", .order = last_in_first_out});
  EXPECT_EQ(name_of(kind), "lifo");
  EXPECT_EQ(schedule_kind_named("lifo"), kind);
  EXPECT_THAT(schedule_kinds(), ::testing::Contains(kind));
  const Schedule schedule = make_schedule(kind, {.num_ranks = 2, .num_micro_batches = 2});
  EXPECT_EQ(schedule.name, "lifo");
  EXPECT_NO_THROW(check(schedule));
  std::string texts;
  for (const Action& action : schedule.actions[1]) texts += to_text(action) + " ";
  EXPECT_EQ(texts, "RA1.0 RA1.1 F1.0 F1.1 B1.1 SG1.1 B1.0 SG1.0 ");
}

TEST(ScheduleRegistry, PlacesStagesAsTheDefinitionSays) {
  const ScheduleKind kind = register_schedule({.name = "backwards",
                                               .rank_of_stage =
                                                   [](const ScheduleSize& size) {
                                                     std::vector<int> ranks;
                                                     for (int rank = size.num_ranks; rank-- > 0;)
                                                       ranks.push_back(rank);
                                                     return ranks;
                                                   },
                                               .order =
                                                   [](const ScheduleSize& size) {
                                                     Order order = last_in_first_out(size);
                                                     std::ranges::reverse(order);
                                                     return order;
                                                   }});
  EXPECT_THAT(make_schedule(kind, {.num_ranks = 3}).rank_of_stage, ElementsAre(2, 1, 0));
}

TEST(ScheduleRegistry, RefusesDefinitionsThatCannotBeUsed) {
  const auto refusal = [](ScheduleDefinition definition) {
    return usage_error([&] { register_schedule(std::move(definition)); });
  };
  EXPECT_THAT(refusal({.name = "1f1b", .order = last_in_first_out}),
              HasSubstr("there is a schedule called 1f1b already"));
  for (const char* name : {"", "My schedule", "a\"b"})
    EXPECT_THAT(refusal({.name = name, .order = last_in_first_out}), HasSubstr("cannot be called"));
  EXPECT_THAT(refusal({.name = "no-order"}), HasSubstr("no-order has no order"));
  EXPECT_THAT(refusal({.name = "no-stages", .num_chunks = 0, .order = last_in_first_out}),
              HasSubstr("0 stages a rank"));
  EXPECT_THAT(usage_error([] { schedule_kind_named("no-stages"); }), HasSubstr("no kind"));
}

TEST(ScheduleRegistry, RefusesOrdersThatCannotRun) {
  static Order (*order)(const ScheduleSize&) = last_in_first_out;
  const ScheduleKind kind = register_schedule(
      {.name = "mistaken", .order = [](const ScheduleSize& size) { return order(size); }});
  const auto refusal = [&](Order (*mistaken)(const ScheduleSize&)) {
    order = mistaken;
    const std::string text =
        usage_error([&] { make_schedule(kind, {.num_ranks = 2, .num_micro_batches = 2}); });
    order = last_in_first_out;
    return text;
  };
  EXPECT_THAT(refusal([](const ScheduleSize& size) {
                Order order = last_in_first_out(size);
                order[0].back() = {ActionKind::forward, 7, 0};
                return order;
              }),
              AllOf(HasSubstr("the schedule mistaken for 2 ranks and 2 micro-batches"),
                    HasSubstr("rank 0, action 3 (F7.0): there is no stage 7")));
  EXPECT_THAT(refusal([](const ScheduleSize& size) {
                Order order = last_in_first_out(size);
                order[1].back() = {ActionKind::backward_input, 1, 0};
                return order;
              }),
              HasSubstr("rank 1 has no W1.0"));
  EXPECT_THAT(refusal([](const ScheduleSize& size) {
                Order order = last_in_first_out(size);
                std::ranges::reverse(order[0]);
                return order;
              }),
              HasSubstr("has to come first"));
  EXPECT_THAT(refusal([](const ScheduleSize& size) {
                Order order = last_in_first_out(size);
                order.pop_back();
                return order;
              }),
              HasSubstr("its order has 1 ranks, and 2 were asked for"));
}

}  // namespace
}  // namespace lockstep::pipeline

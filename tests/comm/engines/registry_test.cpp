// The table of backends, and the functions that make them.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/backends.h>

#include "ranks.h"

namespace lockstep::comm::backends {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

template <typename Action>
std::string complaint(const Action& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

MakeGroup made_as(const std::string& other) {
  return [other](const GroupInfo& group, const GroupOptions& options) {
    return make_group(other, group, options);
  };
}

TEST(Registry, ListsWhatThereIs) {
  const auto built = available_backends();
  const auto ucc = [] { make_group("ucc", group_info("world", 0, 1), {}); };
  EXPECT_THAT(complaint(ucc), HasSubstr("there is no backend 'ucc'"));
  for (const std::string& name : built) EXPECT_THAT(complaint(ucc), HasSubstr(name));
  for (const Capabilities& row : table()) {
    if (testing::Value(built, Contains(row.name))) continue;
    EXPECT_THAT(complaint([&] { check_backend(row.name); }),
                AllOf(HasSubstr("not in this build"), HasSubstr(row.needs_to_build)));
  }
}

TEST(Registry, EveryRowIsMadeOrSaysWhatItNeeds) {
  const auto built = available_backends();
  std::set<std::string> names;
  for (const Capabilities& row : table()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.inside_a_host.empty()) << row.name;
    const bool is_built = testing::Value(built, Contains(row.name));
    EXPECT_TRUE(is_built || !row.needs_to_build.empty()) << row.name;
  }
  for (const std::string& name : built)
    EXPECT_TRUE(name == kAutomatic || names.contains(name)) << name;
}

// Two ranks as threads, for each backend whose ranks may be threads.
TEST(Registry, TheTableIsTrue) {
  const JobStore job;
  for (const std::string& name : available_backends()) {
    const auto row = find(name);
    if (!row || row->makes == Makes::lanes || row->started_by == StartedBy::mpirun) continue;
    SCOPED_TRACE(name);
    const std::vector<std::shared_ptr<Endpoint>> endpoints = {
        std::make_shared<Endpoint>("127.0.0.1", job.secret()),
        std::make_shared<Endpoint>("127.0.0.1", job.secret())};
    run_ranks(2, [&](int rank) {
      const auto group =
          make_group(name, group_info("world", rank, 2),
                     {.store = job.connect(),
                      .timeout = milliseconds(20'000),
                      .endpoint = endpoints[static_cast<std::size_t>(rank)],
                      .addresses = {endpoints[0]->address(), endpoints[1]->address()},
                      .group_id = "table/" + name});
      EXPECT_EQ(group->canonical_order(), row->sums == Sums::canonical);
      EXPECT_EQ(find(group->backend())->inside_a_host, row->inside_a_host);
      EXPECT_EQ(group->lane(), "");
      group->barrier().wait();
    });
  }
}

TEST(Registry, ProgramsAddTheirOwn) {
  const Backend mine{.can = {.name = "mine", .title = "mine"}, .make = made_as("tcp")};
  EXPECT_FALSE(find("mine").has_value());
  register_backend(mine);
  EXPECT_THAT(names(), Contains("mine"));
  EXPECT_THAT(available_backends(), Contains("mine"));
  EXPECT_THAT(complaint([&] { register_backend(mine); }), HasSubstr("there is a backend 'mine'"));
}

TEST(Registry, RefusesWhatCannotBeChosenOrMade) {
  const auto add_named = [](const std::string& name) {
    return complaint([&] { register_backend({.can = {.name = name}, .make = made_as("tcp")}); });
  };
  EXPECT_THAT(add_named("auto"), HasSubstr("there is a backend 'auto'"));
  EXPECT_THAT(add_named("tcp"), HasSubstr("there is a backend 'tcp'"));
  EXPECT_THAT(add_named(""), HasSubstr("needs a name"));
  EXPECT_THAT(complaint([] { register_backend({.can = {.name = "idle"}}); }),
              HasSubstr("nothing makes the backend 'idle'"));
  EXPECT_THAT(
      complaint([] {
        register_backend({.can = {.name = "half", .makes = Makes::lanes}, .make = made_as("tcp")});
      }),
      HasSubstr("nothing makes the backend 'half'"));
  EXPECT_FALSE(find("idle").has_value());
}

}  // namespace
}  // namespace lockstep::comm::backends

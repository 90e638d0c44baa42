// Groups made by split, and how groups end.
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

#include "reference.h"
#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

// Expects that the group has these members, works, and adds in its own ranks' order.
void check_group(Suite& suite, Communicator& group, const std::vector<int>& members) {
  suite.expect(group.global_ranks() == members, "wrong members");
  suite.expect(group.size() == static_cast<int>(members.size()), "wrong size");
  suite.expect(members[static_cast<std::size_t>(group.rank())] == suite.rank(), "wrong rank");
  std::vector<at::Tensor> inputs;
  for (const int member : members)
    inputs.push_back(values(at::kFloat, 5003, 300 + static_cast<std::uint64_t>(member)));
  at::Tensor tensor = suite.place(inputs[static_cast<std::size_t>(group.rank())]);
  group.all_reduce(tensor).wait();
  const at::Tensor wanted = canonical(inputs, ReduceOp::sum);
  if (group.canonical_order()) {
    suite.expect_same(tensor, wanted, "all_reduce");
  } else {
    suite.expect(within_rounding(tensor, wanted, inputs, ReduceOp::sum), "all_reduce");
  }
  at::Tensor ranks = suite.room(group.size(), at::kInt);
  group.all_gather(ranks, suite.place(at::full({1}, suite.rank(), at::kInt))).wait();
  suite.expect_same(ranks, at::tensor(members, at::kInt), "all_gather");
}

std::vector<int> ranks_where(Suite& suite, const std::function<bool(int)>& chosen, bool reversed) {
  std::vector<int> ranks;
  for (int rank = 0; rank < suite.size(); ++rank)
    if (chosen(rank)) ranks.push_back(rank);
  if (reversed) std::reverse(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

void check_groups(Suite& suite) {
  Communicator& world = suite.group();
  suite.cell("split by color, in order of rank", [&] {
    const auto group = world.split(suite.rank() % 2, 0, "halves");
    suite.expect(group->name() == "halves", "its name is " + group->name());
    suite.expect(group->generation() == world.generation(), "its generation");
    check_group(suite, *group,
                ranks_where(
                    suite, [&](int r) { return r % 2 == suite.rank() % 2; }, false));
  });
  suite.cell("split with keys that turn the order around", [&] {
    const auto group = world.split(7, -suite.rank(), "reversed");
    check_group(suite, *group,
                ranks_where(
                    suite, [](int) { return true; }, true));
  });
  suite.cell("split where rank 0 stays outside", [&] {
    const auto group = world.split(suite.rank() == 0 ? -1 : 3, 0, "others");
    suite.expect((group == nullptr) == (suite.rank() == 0), "who has a group");
    if (group)
      check_group(suite, *group,
                  ranks_where(
                      suite, [](int r) { return r > 0; }, false));
  });
  suite.cell("groups of one", [&] {
    const auto group = world.split(suite.rank(), 0, "alone");
    check_group(suite, *group, {suite.rank()});
  });
  suite.cell("a group of a group, and two of one name at once", [&] {
    const auto outer = world.split(0, suite.rank(), "pair");
    const auto inner = outer->split(suite.rank() / 2, 0, "pair");
    const auto members = ranks_where(
        suite, [&](int r) { return r / 2 == suite.rank() / 2; }, false);
    const auto everyone = ranks_where(
        suite, [](int) { return true; }, false);
    check_group(suite, *inner, members);
    check_group(suite, *outer, everyone);
    // Calls of several groups in flight must not disturb each other.
    at::Tensor a = suite.place(at::ones({1000}, at::kLong));
    at::Tensor b = suite.place(at::ones({70'000}, at::kLong));
    at::Tensor c = suite.place(at::ones({10}, at::kLong));
    std::vector<Work> works = {world.all_reduce(a), inner->all_reduce(b), outer->all_reduce(c)};
    for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
    suite.expect(a.eq(suite.size()).all().item<bool>(), "world");
    suite.expect(b.eq(inner->size()).all().item<bool>(), "inner");
    suite.expect(c.eq(suite.size()).all().item<bool>(), "outer");
  });
  suite.cell("a group outlives the one it was split from", [&] {
    auto outer = world.split(0, suite.rank(), "outer");
    const auto inner = outer->split(0, suite.rank(), "inner");
    outer.reset();
    check_group(suite, *inner,
                ranks_where(
                    suite, [](int) { return true; }, false));
  });
  // Rank 0 computes on its device while a receive waits there for a message that rank 1 sends only
  // after it has the result. Closing another group meanwhile must not block that computation,
  // although a device may wait for all of its work before it frees memory.
  suite.cell("a group is closed while another waits", [&] {
    auto closed = world.split(0, suite.rank(), "closed");
    const auto there = world.split(0, suite.rank(), "there"),
               back = world.split(0, suite.rank(), "back");
    at::Tensor answer = suite.room(1, at::kFloat), question = suite.room(1, at::kFloat);
    if (suite.size() == 1) return;
    const auto ask = [&] {
      if (suite.rank() == 0) there->exchange({send_to(1, question)}).wait_on_host();
      if (suite.rank() == 1) there->exchange({receive_from(0, question)}).wait_on_host();
    };
    ask();  // once before, so that the ranks are connected
    Work received;
    if (suite.rank() == 0) received = back->exchange({receive_from(1, answer)});
    closed.reset();
    if (suite.rank() == 0 && !suite.device().is_cpu())
      for (int i = 0; i < 20; ++i) {
        question = suite.place(at::full({1}, i, at::kFloat)) + 1;
        suite.expect(question.item<float>() == static_cast<float>(i + 1), "a sum");
        std::this_thread::sleep_for(milliseconds(50));
      }
    ask();
    if (suite.rank() == 1) back->exchange({send_to(0, question)}).wait_on_host();
    if (suite.rank() == 0) received.wait_on_host();
    if (suite.rank() == 0) suite.expect_same(answer, question.cpu(), "the answer");
  });
}

namespace {

// Returns the CommError that a body throws; fails if it throws none.
std::optional<CommError> error_of(Suite& suite, const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error;
  }
  suite.expect(false, "should have thrown a CommError");
  return std::nullopt;
}

}  // namespace

// Each of these cells ends a group of its own, and the world goes on. gloo and mpi promise other
// things here, which have tests of their own.
void check_ends(Suite& suite) {
  if (!suite.is_ours() || suite.size() == 1) return;
  suite.cell("abort while the others wait", [&] {
    const auto group = suite.group().split(0, suite.rank(), "aborted");
    if (suite.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      group->abort("the test says so");
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto error = error_of(suite, [&] { group->barrier().wait(); });
      if (!error) continue;
      suite.expect(error->fault() == Fault::aborted, error->what());
      suite.expect(error->ranks() == std::vector<int>{0}, error->what());
      suite.expect_text(error->what(), "the test says so");
      suite.expect_text(error->what(), "aborted");
    }
  });
  suite.cell("abort from another thread of a rank that waits itself", [&] {
    const auto group = suite.group().split(0, suite.rank(), "aborted within");
    std::thread aborter;
    if (suite.rank() == 0)
      aborter = std::thread([&group] {
        std::this_thread::sleep_for(milliseconds(50));
        group->abort("enough");
      });
    // Rank 1 never makes the call, so the others are inside it when it ends.
    if (suite.rank() != 1)
      if (const auto error = error_of(suite, [&] { group->barrier().wait(); }))
        suite.expect(error->fault() == Fault::aborted, error->what());
    if (aborter.joinable()) aborter.join();
    suite.group().barrier().wait();
    if (suite.rank() == 1)
      if (const auto error = error_of(suite, [&] { group->barrier().wait(); }))
        suite.expect(error->fault() == Fault::aborted, error->what());
  });
  suite.cell("a call's own timeout names who is missing", [&] {
    const auto group = suite.group().split(0, suite.rank(), "late");
    const int missing = suite.size() - 1;
    if (suite.rank() != missing) {
      const auto begin = Clock::now();
      const auto error = error_of(suite, [&] {
        group->all_reduce(suite.room(10, at::kFloat), ReduceOp::sum, {.timeout = milliseconds(200)})
            .wait_on_host();
      });
      suite.expect(Clock::now() - begin < std::chrono::seconds(10), "ended far too late");
      if (error) {
        suite.expect(error->fault() == Fault::timeout, error->what());
        suite.expect(error->ranks() == std::vector<int>{missing}, error->what());
        suite.expect_text(error->what(), "late");
      }
    }
    suite.group().barrier().wait();
    if (suite.rank() == missing)
      error_of(suite, [&] { group->all_reduce(suite.room(10, at::kFloat)).wait_on_host(); });
  });
  suite.cell("the world has not noticed", [&] {
    at::Tensor tensor = suite.room(100, at::kFloat);
    suite.group().all_reduce(tensor).wait();
    suite.expect(tensor.eq(suite.size()).all().item<bool>(), "result");
  });
}

}  // namespace lockstep::comm::conformance

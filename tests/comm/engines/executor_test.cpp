// Any exception of a job reaches the thread that waits for it, and none ends the process.
#include <gtest/gtest.h>

#include <lockstep/comm/backends/native/calls.h>

namespace lockstep::comm::backends {
namespace {

constexpr milliseconds kLongest(20'000);

class FunctionJob final : public Job {
 public:
  explicit FunctionJob(std::function<void()> function)
      : Job(Deadline::after(kLongest)), function_(std::move(function)) {}

 private:
  void run() override { function_(); }
  void let_go() noexcept override { function_ = nullptr; }

  std::function<void()> function_;
};

std::shared_ptr<Job> job(std::function<void()> run) {
  return std::make_shared<FunctionJob>(std::move(run));
}

class ExecutorFailure : public ::testing::TestWithParam<Launch> {};

TEST_P(ExecutorFailure, OfAnyKind) {
  int told = 0;
  Executor executor([&](const std::exception_ptr&) {
    ++told;
    throw "cannot tell";  // NOLINT: no std::exception
  });
  const auto first = job([] { throw 7; });  // NOLINT
  bool ran = false;
  const auto second = job([&] { ran = true; });
  for (const auto& one : {first, second}) executor.submit(one, GetParam());
  for (const auto& one : {first, second}) {
    try {
      executor.wait(*one, Deadline::after(kLongest));
      ADD_FAILURE() << "nothing was thrown";
    } catch (int thrown) {
      EXPECT_EQ(thrown, 7);
    }
  }
  EXPECT_EQ(told, 1);
  EXPECT_FALSE(ran);
}

TEST_P(ExecutorFailure, WhileItIsEnded) {
  Executor executor([](const std::exception_ptr&) {});
  executor.fail(std::make_exception_ptr(7), [] { throw "cannot tell"; });  // NOLINT
  const auto late = job([] {});
  executor.submit(late, GetParam());
  EXPECT_THROW(executor.wait(*late, Deadline::after(kLongest)), int);
}

INSTANTIATE_TEST_SUITE_P(Launches, ExecutorFailure,
                         ::testing::Values(Launch::in_background, Launch::on_wait));

TEST(ExecutorWaits, AreTimedWhereTheyAreNotOverAtOnce) {
  std::vector<Clock::duration> waits;
  Executor executor([](const std::exception_ptr&) {},
                    [&](Clock::duration waited) { waits.push_back(waited); });
  const auto one = job([] {});
  executor.submit(one, Launch::on_wait);
  EXPECT_TRUE(executor.wait(*one, Deadline::after(kLongest)));
  ASSERT_EQ(waits.size(), 1u);
  EXPECT_GE(waits[0].count(), 0);
  EXPECT_TRUE(executor.wait(*one, Deadline::after(kLongest)));
  EXPECT_EQ(waits.size(), 1u);
}

}  // namespace
}  // namespace lockstep::comm::backends

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/plan/tape.h>

namespace lockstep::plan {
namespace {

using Value = Tape::Value;
using ::testing::ElementsAre;

// A layer that keeps its input, as a linear layer does.
Value layer(Tape& tape, const Value& x, std::int64_t bytes, std::size_t parameter) {
  return tape.apply({.inputs = {x},
                     .bytes = bytes,
                     .saved = {x.memory},
                     .parameters = {parameter},
                     .read_again = {parameter}});
}

TEST(Tape, KeepsWhatIsSavedUntilBackwardHasReadIt) {
  Tape tape;
  const std::size_t first = tape.add_parameter(7);
  const std::size_t second = tape.add_parameter(11);
  Value x = tape.input(100);
  Value y = layer(tape, std::exchange(x, {}), 30, first);
  Value loss = layer(tape, std::exchange(y, {}), 1, second);
  const StepTrace trace = tape.backward(std::move(loss));
  EXPECT_EQ(trace.saved_bytes, 131);
  std::vector<std::int64_t> peaks;
  std::vector<std::size_t> order;
  for (const auto& event : trace.events) {
    peaks.push_back(event.peak_bytes);
    order.push_back(event.parameter);
  }
  EXPECT_THAT(order, ElementsAre(first, second, second, second, first, first));
  // In order: the input; with y; the loss and its gradient; the gradients of y and the parameter;
  // the gradient of y alone, because the parameter's has been delivered; and that of the first
  // layer, which needs no gradient of its input.
  EXPECT_THAT(peaks, ElementsAre(100, 130, 132, 131 + 30 + 11, 130, 130 + 7));
  EXPECT_EQ(trace.peak_bytes_after, 0);
}

TEST(Tape, LetsGoOfWhatNobodyKeeps) {
  Tape tape;
  const Value x = tape.input(10);
  Value y = tape.apply({.inputs = {x}, .bytes = 1000, .forward_scratch = 500});
  Value z = tape.apply({.inputs = {std::exchange(y, {})}, .bytes = 1});
  const StepTrace trace = tape.backward(std::move(z));
  EXPECT_EQ(trace.saved_bytes, 11);
  EXPECT_EQ(trace.peak_bytes(), 1510);
}

TEST(Tape, HandsOnAGradientWithoutACopy) {
  Tape tape;
  const std::size_t parameter = tape.add_parameter(1);
  const Value x = layer(tape, tape.input(100), 100, parameter);
  const StepTrace trace = tape.backward(tape.add(x, x));
  // The saved input, x in its variable, the sum, and one gradient that serves for all.
  EXPECT_EQ(trace.peak_bytes(), 400);
}

TEST(Tape, AParameterThatIsReadTwiceGetsItsGradientOnce) {
  Tape tape;
  const std::size_t parameter = tape.add_parameter(50);
  const Value x = layer(tape, tape.input(1), 1, parameter);
  const StepTrace trace = tape.backward(layer(tape, x, 1, parameter));
  EXPECT_EQ(std::ranges::count(trace.events, StepTrace::Kind::gradient, &StepTrace::Event::kind),
            1);
  // The first one waits for the second.
  EXPECT_GE(trace.peak_bytes(), 100);
}

TEST(Tape, PutsViewsTogetherAgain) {
  Tape tape;
  const std::size_t parameter = tape.add_parameter(1);
  const Value whole = layer(tape, tape.input(1), 30, parameter);
  const auto parts = tape.split(whole, {10, 20});
  const StepTrace trace = tape.backward(tape.apply({.inputs = {parts[0], parts[1]}, .bytes = 1}));
  EXPECT_EQ(trace.saved_bytes, 32);
  EXPECT_EQ(trace.peak_bytes(), 31 + 30 + 30);
}

TEST(Tape, RecomputesWithoutKeeping) {
  constexpr std::int64_t kWide = 100'000;
  const auto step = [&](bool recomputed) {
    Tape tape;
    Value x = tape.input(10);
    for (int i = 0; i < 5; ++i) {
      const std::size_t wide = tape.add_parameter(1);
      const std::size_t narrow = tape.add_parameter(1);
      const Tape::Function block = [&tape, wide, narrow](const Value& input) {
        return layer(tape, layer(tape, input, kWide, wide), 10, narrow);
      };
      x = recomputed ? tape.recompute(block, x) : block(x);
    }
    return tape.backward(std::move(x));
  };
  const StepTrace plain = step(false);
  const StepTrace recomputed = step(true);
  EXPECT_GT(plain.saved_bytes, 5 * kWide);
  EXPECT_LT(recomputed.saved_bytes, kWide);
  EXPECT_GT(plain.peak_bytes(), 5 * kWide);
  // One block's activations and their gradient.
  EXPECT_GT(recomputed.peak_bytes(), 2 * kWide);
  EXPECT_LT(recomputed.peak_bytes(), 3 * kWide);
  const auto count = [](const StepTrace& trace, StepTrace::Kind kind) {
    return std::ranges::count(trace.events, kind, &StepTrace::Event::kind);
  };
  EXPECT_EQ(count(recomputed, StepTrace::Kind::gradient), 10);
  // Both parameters of each block are read in forward, in recomputation, and in backward.
  EXPECT_EQ(count(plain, StepTrace::Kind::use), 20);
  EXPECT_EQ(count(recomputed, StepTrace::Kind::use), 30);
}

}  // namespace
}  // namespace lockstep::plan

// Models that are built without memory, as DistributedManager::build_model() does.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <lockstep/deferred/construction.h>
#include <lockstep/models/make_model.h>

namespace lockstep::models {
namespace {

ModelConfig sizes(const std::string& family, std::int64_t width, std::int64_t layers) {
  return {.family = family,
          .vocab_size = 8 * width,
          .hidden_size = width,
          .num_layers = layers,
          .num_heads = width / 32,
          .max_positions = 256};
}

class DeferredModel : public ::testing::TestWithParam<std::string> {};

TEST_P(DeferredModel, BeginsWithTheBitsOfAPlainOne) {
  const ModelConfig config = sizes(GetParam(), 160, 2);
  const auto plain = make_model(config, 7);
  deferred::Construction construction;
  const auto built = construction.construct([&] { return make_model(config, 7); });
  const auto expected = plain->named_parameters();
  ASSERT_EQ(built->named_parameters().size(), expected.size());
  int num_deferred = 0;
  for (const auto& item : built->named_parameters()) {
    num_deferred += construction.is_deferred(item.value()) ? 1 : 0;
    const auto values = construction.materialise(std::vector{item.value()});
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  }
  EXPECT_GT(num_deferred, 8);
}

// The model takes more memory than any machine has.
TEST_P(DeferredModel, TakesNoMemory) {
  const ModelConfig config = sizes(GetParam(), 8192, 80);
  deferred::Construction construction;
  const auto built = construction.construct([&] { return make_model(config, 7); });
  EXPECT_GT(num_parameters(config), 50'000'000'000);
  EXPECT_LT(construction.peak_bytes(), 1 << 20);
  for (const auto& item : built->named_parameters())
    EXPECT_TRUE(item.value().nbytes() < (64 << 10) || construction.is_deferred(item.value()))
        << item.key();
}

INSTANTIATE_TEST_SUITE_P(OfEach, DeferredModel, ::testing::Values("gpt2", "llama", "qwen2"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep::models

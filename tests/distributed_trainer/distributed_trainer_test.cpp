// The arguments of a DistributedTrainer: models, losses, datasets and metrics in every form.
#include <lockstep/train/distributed_trainer.h>

#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/loss.h>

#include <tests/ranks/job.h>

#include "../base/errors.h"
#include "line.h"

namespace lockstep {
namespace {

using at::Tensor;
using ::testing::HasSubstr;

// A model with two outputs, neither of which is a plain tensor.
struct TwoHeads : NetImpl {
  std::tuple<Tensor, Tensor> forward(Tensor input) {
    const Tensor output = NetImpl::forward(input);
    return {output, 2 * output};
  }
};

TrainerOptions options() {
  return {.epochs = 3,
          .batch_size = 7,  // the last batch of 20 has 6
          .optimizer = optim::SGDOptions{},
          .learning_rate = 0.1,
          .progress_fd = -1};
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // passes modules by value, too
template <typename Model>
Tensor weights_after(Model model, auto loss, LossReduction reduction = LossReduction::mean) {
  DistributedTrainer trainer(setup_distributed(), std::move(model), loss, options(), reduction);
  trainer.fit(Line(20));
  return trainer.model()->parameters().at(0).detach().cpu();
}
#pragma GCC diagnostic pop

TEST(DistributedTrainer, TakesModelsInEveryForm) {
  const Tensor expected = weights_after(Net(), kMean);
  EXPECT_FALSE(at::allclose(expected, at::full({1, 2}, 0.5)));
  EXPECT_TRUE(at::equal(weights_after(std::make_shared<NetImpl>(), kMean), expected));
  EXPECT_TRUE(at::equal(weights_after(NetImpl(), kMean), expected));
  EXPECT_TRUE(at::equal(weights_after(torch::nn::Sequential(Net()), kMean), expected));
  EXPECT_TRUE(
      at::equal(weights_after(TwoHeads(),
                              [](const std::tuple<Tensor, Tensor>& heads, const Tensor& target) {
                                return kMean(std::get<0>(heads), target);
                              }),
                expected));
}

TEST(DistributedTrainer, TakesLossesInEveryForm) {
  const Tensor expected = weights_after(Net(), kMean);
  EXPECT_TRUE(at::allclose(weights_after(Net(), torch::nn::MSELoss()), expected));
  const auto sum = [](const Tensor& output, const Tensor& target) {
    return squares(output, target).sum();
  };
  EXPECT_TRUE(at::allclose(weights_after(Net(), sum, LossReduction::sum), expected));
  EXPECT_FALSE(at::allclose(weights_after(Net(), sum), expected));
  const auto counted = [](const Tensor& output, const Tensor& target) {
    return nn::LossSum{.sum = squares(output, target).sum(), .count = output.size(0)};
  };
  EXPECT_TRUE(at::allclose(weights_after(Net(), counted), expected));
}

TEST(DistributedTrainer, ReportsMeansOverTheValidationSet) {
  // A learning rate of 0 leaves the weights as they are, so the expected means are known.
  const Net net;
  TrainerOptions still = options();
  still.learning_rate = 0;
  DistributedTrainer trainer(setup_distributed(), net, kMean, still);
  trainer
      .add_metric("high", [](const Tensor& output,
                             const Tensor& target) { return target.gt(output).sum(); })
      .add_metric("ones", [](const Tensor& output, const Tensor&) { return output.size(0); });
  const TrainingResult result = trainer.fit(Line(20), Line(15));
  // 3x − 2 > x/2 + 1/2 if x > 1, which holds for samples 11 to 14 of 15. The sum of squares is
  // computed by hand:
  double squared = 0;
  for (int k = 0; k < 15; ++k) squared += (0.25 * k - 2.5) * (0.25 * k - 2.5);
  ASSERT_TRUE(result.validation_loss);
  EXPECT_NEAR(*result.validation_loss, squared / 15, 1e-5);
  ASSERT_EQ(result.validation_metrics.size(), 2u);
  EXPECT_EQ(result.validation_metrics[0].name, "high");
  EXPECT_DOUBLE_EQ(result.validation_metrics[0].value, 4.0 / 15);
  EXPECT_DOUBLE_EQ(result.validation_metrics[1].value, 1);
}

TEST(DistributedTrainer, WithoutValidationThereIsNone) {
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, options());
  const TrainingResult result = trainer.fit(data::from_torch(Line(20)));
  EXPECT_EQ(result.step, 9);
  EXPECT_EQ(result.resumed_after, 0);
  EXPECT_FALSE(result.validation_loss);
}

TEST(DistributedTrainer, FitsAgainFromWhereTheWeightsAre) {
  auto dist = setup_distributed();
  // A model that is already wrapped is used unchanged.
  DistributedTrainer trainer(dist, dist.wrap_model(Net()), kMean, options());
  const double first = trainer.fit(Line(20)).loss;
  EXPECT_LT(trainer.fit(Line(20)).loss, first);
}

TEST(DistributedTrainer, TwoRanks) { ranks::expect_cells_pass(2, {"--rank"}); }
TEST(DistributedTrainer, StagesInBf16) { ranks::expect_cells_pass(2, {"--stages"}); }

TEST(DistributedTrainer, RefusesWhatIsNoLoss) {
  const auto complaint = [](auto loss) { return usage_error([&] { weights_after(Net(), loss); }); };
  EXPECT_THAT(
      complaint([](const Tensor& output, const Tensor& target) { return squares(output, target); }),
      HasSubstr("shape [7, 1]: it must be one number"));
  EXPECT_THAT(complaint([](const Tensor& output, const Tensor& target) {
                return squares(output.detach(), target).mean();
              }),
              HasSubstr("does not depend on any parameter"));
}

TEST(DistributedTrainer, RefusesMetricsItCannotReport) {
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, options());
  const auto zero = [](const Tensor&, const Tensor&) { return 0; };
  trainer.add_metric("good", zero);
  EXPECT_THAT(usage_error([&] { trainer.add_metric("good", zero); }), HasSubstr("two metrics"));
  EXPECT_THAT(usage_error([&] { trainer.add_metric("loss", zero); }), HasSubstr("by itself"));
  EXPECT_THAT(usage_error([&] { trainer.add_metric("", zero); }), HasSubstr("letters"));
  EXPECT_THAT(usage_error([&] { trainer.add_metric("a,b", zero); }), HasSubstr("letters"));
  trainer.add_metric("many", [](const Tensor& output, const Tensor&) { return output; });
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(20), Line(3)); }),
              HasSubstr("'many' of a batch is a tensor of shape [3, 1]"));
}

TEST(DistributedTrainer, RefusesToTrainOnNothing) {
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, options());
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(0)); }), HasSubstr("train on"));
  EXPECT_THAT(usage_error([&] { trainer.fit(nullptr); }), HasSubstr("null"));
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(20), Line(0)); }), HasSubstr("validate on"));
}

}  // namespace
}  // namespace lockstep

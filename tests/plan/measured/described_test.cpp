// The descriptions of language models in numbers, compared with models that are made and run.
#include <gtest/gtest.h>

#include <lockstep/plan/measured/trace_step.h>

#include "models.h"

namespace lockstep::plan {
namespace {

using models::DescribedModel;
using testing::LanguageSubject;

void expect_same(const ModelSizes& got, const ModelSizes& wanted) {
  ASSERT_EQ(got.units.size(), wanted.units.size());
  for (std::size_t i = 0; i < got.units.size(); ++i) {
    EXPECT_EQ(got.units[i].num_elements, wanted.units[i].num_elements) << "unit " << i;
    EXPECT_EQ(got.units[i].element_bytes, wanted.units[i].element_bytes) << "unit " << i;
    EXPECT_EQ(got.units[i].trained, wanted.units[i].trained) << "unit " << i;
  }
  ASSERT_EQ(got.parameters.size(), wanted.parameters.size());
  for (std::size_t i = 0; i < got.parameters.size(); ++i) {
    EXPECT_EQ(got.parameters[i].num_elements, wanted.parameters[i].num_elements) << i;
    EXPECT_EQ(got.parameters[i].unit, wanted.parameters[i].unit) << i;
  }
}

// The order in which units are used, or get their gradients, without repeats.
std::vector<std::size_t> order_of(const DescribedModel& model, StepTrace::Kind kind) {
  std::vector<std::size_t> order;
  for (const StepTrace::Event& event : model.trace.events) {
    const std::size_t unit = model.sizes.parameters[event.parameter].unit;
    if (event.kind == kind && (order.empty() || order.back() != unit)) order.push_back(unit);
  }
  return order;
}

void expect_near(std::int64_t got, std::int64_t wanted, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(got), static_cast<double>(wanted),
              0.02 * static_cast<double>(wanted))
      << what;
}

std::vector<LanguageSubject> many_models() {
  std::vector<LanguageSubject> all{testing::gpt(), testing::llama(), testing::qwen2()};
  for (const LanguageSubject& plain : {testing::gpt(), testing::llama(), testing::qwen2()}) {
    auto add = [&](const std::string& name, const auto& change) {
      LanguageSubject changed = plain;
      changed.name += ", " + name;
      change(changed);
      all.push_back(changed);
    };
    add("tied or not", [](auto& s) { s.config.tie_embeddings = !s.config.tie_embeddings; });
    add("a large vocabulary", [](auto& s) { s.config.vocab_size = 9000; });
    add("long sequences of one sample",
        [](auto& s) { s.step = {.micro_batch = 1, .sequence_length = 128}; });
    add("many samples", [](auto& s) { s.step.micro_batch = 10; });
    add("few tokens", [](auto& s) { s.step = {.micro_batch = 1, .sequence_length = 8}; });
    add("dropout", [](auto& s) { s.config.dropout = 0.1; });
    add("recomputed", [](auto& s) { s.step.recomputed_blocks = 1; });
    add("half of it recomputed, with dropout", [](auto& s) {
      s.step.recomputed_blocks = 0.5;
      s.config.dropout = 0.1;
    });
    add("one layer", [](auto& s) { s.config.num_layers = 1; });
    add("two layers", [](auto& s) { s.config.num_layers = 2; });
    add("narrow inside", [](auto& s) { s.config.intermediate_size = 40; });
  }
  return all;
}

class Described : public ::testing::TestWithParam<LanguageSubject> {};

TEST_P(Described, IsWhatAModelIsAndDoes) {
  const DescribedModel described = GetParam().described();
  const testing::Subject subject = GetParam().subject().make();
  // The first pass allocates memory that stays.
  trace_step(*subject.module, subject.loss);
  const DescribedModel measured{sizes_of(*subject.module),
                                trace_step(*subject.module, subject.loss)};
  expect_same(described.sizes, measured.sizes);
  expect_near(described.trace.saved_bytes, measured.trace.saved_bytes, "saved for backward");
  expect_near(described.trace.peak_bytes(), measured.trace.peak_bytes(), "the peak");
  for (const auto kind : {StepTrace::Kind::use, StepTrace::Kind::gradient})
    EXPECT_EQ(order_of(described, kind), order_of(measured, kind));
  // With gradients that stay, the peak is at another moment.
  expect_near(estimate_memory(described.sizes, described.trace, {}).peak,
              estimate_memory(measured.sizes, measured.trace, {}).peak, "with whole gradients");
}

INSTANTIATE_TEST_SUITE_P(Plan, Described, ::testing::ValuesIn(many_models()), [](const auto& info) {
  std::string name;
  for (const char letter : info.param.name)
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0) name += letter;
  return name;
});

// These models fit into the memory of no test machine.
TEST(DescribedSizes, AreThoseOfHugeModels) {
  const models::ModelConfig llama_3_70b{.family = "llama",
                                        .vocab_size = 128'256,
                                        .hidden_size = 8192,
                                        .num_layers = 80,
                                        .num_heads = 64,
                                        .num_kv_heads = 8,
                                        .intermediate_size = 28'672,
                                        .max_positions = 8192,
                                        .tie_embeddings = false};
  const models::ModelConfig gpt_3{.family = "gpt2",
                                  .vocab_size = 50'257,
                                  .hidden_size = 12'288,
                                  .num_layers = 96,
                                  .num_heads = 96,
                                  .max_positions = 2048};
  for (const models::ModelConfig& config : {llama_3_70b, gpt_3}) {
    const DescribedModel described = describe(config, {.micro_batch = 1, .sequence_length = 2048});
    EXPECT_EQ(described.sizes.num_elements(), models::num_parameters(config));
    std::int64_t in_parameters = 0;
    for (const auto& parameter : described.sizes.parameters)
      in_parameters += parameter.num_elements;
    EXPECT_EQ(in_parameters, models::num_parameters(config));
  }
}

}  // namespace
}  // namespace lockstep::plan

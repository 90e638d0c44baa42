// Models that are built without memory and then cut: no rank ever holds a whole model.
#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/utils.h>

#include <lockstep/deferred/construction.h>
#include <lockstep/models/make_model.h>
#include <lockstep/parallel/tensor/parallelize_module.h>

#include "tables.h"

namespace lockstep::nn {

namespace {

std::size_t bytes_held(const torch::nn::Module& model) {
  std::size_t bytes = 0;
  for (const auto& item : model.named_parameters()) bytes += item.value().nbytes();
  return bytes;
}

void check_deferred(ranks::Cells& cells, const std::string& family) {
  const models::ModelConfig config{.family = family,
                                   .vocab_size = 1024,
                                   .hidden_size = 192,
                                   .num_layers = 6,
                                   .num_heads = 12,
                                   .intermediate_size = 768,
                                   .max_positions = 64};
  const auto spread = [&](const std::shared_ptr<models::LanguageModel>& model) {
    models::ModelAxes axes;
    axes.tensor = std::make_shared<TensorAxis>(cells.group());
    model->spread(axes);
    model->keep_layers({{0, 2}});
  };
  const auto plain = models::make_model(config, 7);
  const std::size_t whole = bytes_held(*plain);
  spread(plain);
  deferred::Construction construction;
  const auto built = construction.construct([&] { return models::make_model(config, 7); });
  spread(built);
  construction.keep(built->parameters());
  // One parameter at a time is whole in memory, with the tensors that its values are computed from.
  cells.expect(construction.peak_bytes() < whole / 4,
               fmt::format("{} bytes of {} were there at once", construction.peak_bytes(), whole));
  const auto expected = plain->named_parameters();
  cells.expect(built->named_parameters().size() == expected.size(), "other parameters");
  for (const auto& item : built->named_parameters()) {
    cells.expect(!construction.is_deferred(item.value()), item.key() + " has no memory");
    cells.expect_same(item.value(), expected[item.key()], item.key());
  }
  const models::ModelShare share{.num_layers = 2,
                                 .has_embedding = true,
                                 .tensor_rank = cells.rank(),
                                 .tensor_ranks = cells.num_ranks()};
  cells.expect(
      static_cast<std::int64_t>(bytes_held(*built)) == 4 * models::num_parameters(config, share),
      fmt::format("{} bytes are held, and {} parameters", bytes_held(*built),
                  models::num_parameters(config, share)));
}

struct PlainLayers : torch::nn::Module {
  PlainLayers() {
    for (int i = 0; i < 6; ++i)
      layers->push_back(torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(192, 12).dim_feedforward(768)));
    register_module("layers", layers);
  }
  torch::nn::ModuleList layers;
};

// A part takes memory only when its values are asked for, as a strategy does unit by unit.
void check_plain_deferred(ranks::Cells& cells) {
  if (cells.num_ranks() != 2 && cells.num_ranks() != 4) return;
  const auto make = [] {
    torch::manual_seed(7);
    return std::make_shared<PlainLayers>();
  };
  const tensor::Plan plan = {{"layers.*.self_attn", tensor::Cut::heads},
                             {"layers.*.linear1", tensor::Cut::column},
                             {"layers.*.linear2", tensor::Cut::row}};
  const auto plain = make();
  const std::size_t whole = bytes_held(*plain);
  tensor::parallelize_module(*plain, cells.group(), plan);
  deferred::Construction construction;
  const auto built = construction.construct(make);
  tensor::internal::parallelize_deferred(*built, cells.group(), plan,
                                         [&](const std::function<void()>& body) {
                                           construction.construct([&] {
                                             body();
                                             return 0;
                                           });
                                         });
  const auto expected = plain->named_parameters();
  for (const auto& item : built->named_parameters()) {
    const at::Tensor wanted = expected[item.key()];
    cells.expect(tensor::is_cut(item.value()) == tensor::is_cut(wanted), item.key() + " is whole");
    const at::Tensor part = tensor::local_part(item.value());
    const auto values = construction.materialise(std::vector{part});
    cells.expect_same(part.detach(), tensor::local_part(wanted).detach(), item.key());
  }
  // The largest parameter, and what it is computed from.
  cells.expect(construction.bytes() < whole / 20 && construction.peak_bytes() < whole / 10,
               fmt::format("{} bytes are there, and {} of {} were at once", construction.bytes(),
                           construction.peak_bytes(), whole));
}

}  // namespace

void check_deferred_models(ranks::Cells& cells) {
  cells.cell("a GPT built without memory", [&] { check_deferred(cells, "gpt2"); });
  cells.cell("a Llama built without memory", [&] { check_deferred(cells, "llama"); });
  cells.cell("a Qwen2 built without memory", [&] { check_deferred(cells, "qwen2"); });
  cells.cell("plain layers built without memory", [&] { check_plain_deferred(cells); });
}

}  // namespace lockstep::nn

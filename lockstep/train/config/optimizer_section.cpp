#include <limits>

#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

void read_betas(JsonSection& params, std::array<double, 2>& betas) {
  const JsonNode* node = params.find("betas");
  if (node == nullptr) return;
  const auto beta = [](const JsonNode& item) {
    if (const auto* real = std::get_if<double>(&item.value)) return *real;
    const auto* integer = std::get_if<std::int64_t>(&item.value);
    return integer == nullptr ? -1.0 : static_cast<double>(*integer);
  };
  const JsonList* list = node->list();
  if (list != nullptr && list->size() == 2) {
    const std::array<double, 2> read = {beta((*list)[0]), beta((*list)[1])};
    if (read[0] >= 0 && read[0] < 1 && read[1] >= 0 && read[1] < 1) {
      betas = read;
      return;
    }
  }
  params.mistake("betas", fmt::format("is {}: it must be a list of two numbers, each at least 0 "
                                      "and below 1",
                                      node->quoted()));
}

void read_adam(JsonSection& params, OptimizerSection& optimizer) {
  read_betas(params, optimizer.betas);
  params.number("eps", optimizer.eps, {.lowest = 0, .highest = 1, .above_lowest = true});
  params.boolean("adam_w_mode", optimizer.adam_w_mode);
  if (optimizer.type == OptimizerType::adamw && !optimizer.adam_w_mode)
    params.mistake("adam_w_mode", "is false, but optimizer.type is \"AdamW\": use the type "
                                  "\"Adam\" for decay that is part of the gradient");
  params.boolean("bias_correction", optimizer.bias_correction);
  bool amsgrad = false;
  if (params.boolean("amsgrad", amsgrad) && amsgrad)
    params.mistake("amsgrad", "is true: there is no AMSGrad here; remove it");
}

void read_sgd(JsonSection& params, OptimizerSection& optimizer) {
  params.number("momentum", optimizer.momentum, {.lowest = 0, .highest = 1, .below_highest = true});
  params.number("dampening", optimizer.dampening, {.lowest = 0, .highest = 1});
  params.boolean("nesterov", optimizer.nesterov);
  if (optimizer.nesterov && (optimizer.momentum == 0 || optimizer.dampening != 0) &&
      params.sound({"momentum", "dampening"}))
    params.mistake("nesterov", fmt::format("is true, but momentum is {} and dampening {}: it needs "
                                           "a momentum above 0 and no dampening",
                                           optimizer.momentum, optimizer.dampening));
}

}  // namespace

void read_batch(JsonSection& top, BatchSection& batch) {
  top.integer("train_batch_size", batch.global, 1, kMostSamples);
  top.integer("train_micro_batch_size_per_gpu", batch.micro, 1, kMostSamples);
  top.integer("gradient_accumulation_steps", batch.accumulation, 1, kMostSamples);
}

void read_optimizer(JsonSection& top, OptimizerSection& optimizer) {
  JsonSection section = top.section("optimizer");
  if (!section.present())
    top.missing("optimizer", "say how to train, for example \"optimizer\": {\"type\": \"AdamW\", "
                             "\"params\": {\"lr\": 3e-4}}");
  const bool typed = section.choice("type", optimizer.type, kOptimizers);
  JsonSection params = section.section("params");
  if (!typed && section.find("type") != nullptr) {
    params.allow_anything();
    return;
  }
  params.call(name_of(optimizer.type, kOptimizers));
  if (!params.number("lr", optimizer.lr, {.lowest = 0, .highest = 1000, .above_lowest = true}))
    params.missing("lr", "the learning rate, for example 3e-4");
  params.number("weight_decay", optimizer.weight_decay, {.lowest = 0, .highest = kUnbounded});
  if (params.find("max_grad_norm") != nullptr)
    params.mistake("max_grad_norm", "does not belong there: use gradient_clipping, at the top of "
                                    "the config");
  if (optimizer.type == OptimizerType::sgd)
    read_sgd(params, optimizer);
  else
    read_adam(params, optimizer);
}

}  // namespace lockstep::train

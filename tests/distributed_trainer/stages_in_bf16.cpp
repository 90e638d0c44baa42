// Stages of a language model that compute in 16 bits, as on a GPU, compared with the whole model.
#include <set>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/record_function.h>

#include <lockstep/device/autocast.h>
#include <lockstep/models/make_model.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/train/language_model_task.h>

#include "ranks.h"

namespace lockstep {

namespace {

constexpr int kSequence = 8;

models::ModelConfig tiny_model() {
  return {.vocab_size = 32, .hidden_size = 16, .num_layers = 4, .num_heads = 2, .max_positions = 8};
}

data::Batch tokens_of(int micro_batch) {
  const at::Tensor tokens =
      (at::arange(2 * (kSequence + 1)) * (micro_batch + 3) % 31).view({2, -1});
  return {.input = tokens.narrow(1, 0, kSequence),
          .target = tokens.narrow(1, 1, kSequence),
          .rows = {0, 1}};
}

// The loss, and the gradients of this rank's parameters in their order in the whole model.
struct Passes {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
};

Passes gradients_of(const models::LanguageModel& model, double loss) {
  Passes passes{.loss = loss, .gradients = {}};
  for (const auto& item : model.named_parameters())
    passes.gradients[item.key()] = item.value().grad();
  return passes;
}

// The batches of both micro-batches.
std::vector<data::Batch> full_step() { return {tokens_of(0), tokens_of(1)}; }

Passes in_one_process(std::optional<at::ScalarType> cast_to,
                      const std::vector<data::Batch>& batches = full_step()) {
  const auto model = models::make_model(tiny_model(), 5);
  double sum = 0;
  for (const data::Batch& batch : batches) {
    std::optional<device::Autocast> cast;
    if (cast_to) cast.emplace(at::kCPU, *cast_to);
    const at::Tensor loss = model->loss(batch.input, batch.target).sum;
    cast.reset();
    loss.backward();
    sum += loss.item<double>();
  }
  return gradients_of(*model, sum);
}

Passes in_stages(const std::shared_ptr<comm::Communicator>& group,
                 std::optional<at::ScalarType> cast_to,
                 const std::vector<data::Batch>& batches = full_step()) {
  const auto model = models::make_model(tiny_model(), 5);
  const train::RunPipeline plan = {
      .schedule = pipeline::make_schedule(pipeline::ScheduleKind::one_forward_one_backward,
                                          {.num_ranks = 2, .num_micro_batches = 2}),
      .layers = {{0, 2}, {2, 4}}};
  train::LanguageModelPipeline stages(
      model, group, plan, {.micro_batch = 2, .sequence_length = kSequence, .autocast = cast_to});
  return gradients_of(*model, stages.run(0, batches).sum);
}

// Collects the types in which products are computed on this thread.
class TypesOfProducts {
 public:
  TypesOfProducts() {
    types().clear();
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
                                     const std::string name = call.name();
                                     if ((name == "aten::mm" || name == "aten::addmm") &&
                                         !call.inputs().empty() && call.inputs()[0].isTensor())
                                       types().insert(call.inputs()[0].toTensor().scalar_type());
                                     return std::unique_ptr<at::ObserverContext>();
                                   })
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
  ~TypesOfProducts() { at::removeCallback(handle_); }
  const std::set<at::ScalarType>& all() const { return types(); }

 private:
  static std::set<at::ScalarType>& types() {
    static std::set<at::ScalarType> seen;
    return seen;
  }
  at::CallbackHandle handle_{};
};

}  // namespace

void check_stages_in_bf16(ranks::Cells& cells) {
  // oneDNN does not have products in bf16 for every CPU; LibTorch's own are slow, but exist
  // everywhere.
  at::globalContext().setUserEnabledMkldnn(false);
  cells.cell("stages in bf16", [&] {
    const Passes wanted = in_one_process(at::kBFloat16), exact = in_one_process({});
    const Passes got = in_stages(cells.group(), at::kBFloat16);
    cells.expect(std::abs(got.loss / wanted.loss - 1) < 1e-6,
                 fmt::format("loss {} instead of {}", got.loss, wanted.loss));
    cells.expect(got.loss != exact.loss, "nothing lost a digit");
    for (const auto& [name, gradient] : got.gradients)
      // The parts of the tied weight are rounded separately.
      cells.expect(at::allclose(gradient, wanted.gradients.at(name), 2e-2, 1e-3), name);
  });
  const auto check = [&](const std::vector<data::Batch>& batches) {
    const Passes wanted = in_one_process({}, batches), got = in_stages(cells.group(), {}, batches);
    cells.expect(std::abs(got.loss / wanted.loss - 1) < 1e-6,
                 fmt::format("loss {} instead of {}", got.loss, wanted.loss));
    for (const auto& [name, gradient] : got.gradients)
      cells.expect_close(gradient, wanted.gradients.at(name), name);
  };
  cells.cell("and without", [&] { check(full_step()); });
  cells.cell("steps that are not full", [&] {
    data::Batch half = tokens_of(1);
    half.input = half.input.narrow(0, 0, 1);
    half.target = half.target.narrow(0, 0, 1);
    half.rows = {0};
    check({tokens_of(0), half});
    check({tokens_of(0)});
  });
  cells.cell("layers are measured in what they compute in", [&] {
    const auto model = models::make_model(tiny_model(), 5);
    {
      const TypesOfProducts types;
      train::seconds_of_layers(*model, 2, kSequence);
      cells.expect(types.all() == std::set{at::kFloat}, "not in fp32");
    }
    const TypesOfProducts types;
    train::seconds_of_layers(*model, 2, kSequence, at::kBFloat16);
    cells.expect(types.all().contains(at::kBFloat16), "not in bf16");
    for (const at::Tensor& parameter : model->parameters())
      cells.expect(!parameter.grad().defined(), "a gradient is left");
  });
}

}  // namespace lockstep

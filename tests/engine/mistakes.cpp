// What is wrong on one rank or on all, and passes without samples.
#include <torch/nn/modules/linear.h>

#include "layouts.h"
#include "parity.h"

namespace lockstep {

using nlohmann::json;
using ranks::Cells;

namespace {

// Its blocks have one weight, under a name each.
struct SharesUnderTwoNames : plain::Net {
  struct Head : torch::nn::Module {
    explicit Head(const at::Tensor& of) : weight(register_parameter("weight", of)) {}
    at::Tensor weight;
  };
  SharesUnderTwoNames() {
    register_module("first", first);
    head = register_module("head", std::make_shared<Head>(first->weight));
  }
  at::Tensor scores(const at::Tensor& x) { return at::matmul(x, head->weight.t()); }
  at::Tensor forward(const at::Tensor& x) override { return scores(at::tanh(first(x))); }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    return {pipeline::block_of({first.ptr()},
                               [this](const at::Tensor& x) { return at::tanh(first(x)); }),
            pipeline::block_of({head}, [this](const at::Tensor& x) { return scores(x); })};
  }
  torch::nn::Linear first{6, 6};
  std::shared_ptr<Head> head;
};

struct ListsNoBlocks : plain::Mlp {
  std::vector<pipeline::ModelBlock> pipeline_blocks() override { return {}; }
};

void check_pipeline_mistakes(Cells& cells) {
  const Subject subject = subjects().front();
  const auto engine_of = [&](const Subject& of, const json& more = json::object(),
                             const InitializeOptions& options = {}) {
    json parallel = {{"pipeline", 2}};
    parallel.update(more);
    return initialize(config_of(of, {"", {{"parallel", parallel}}}), of.make, options);
  };
  const auto points = std::make_shared<plain::Points>(9);
  const auto batch_of = [&](std::vector<std::int64_t> samples) {
    const data::Batch batch = points->batch(samples);
    return EngineBatch{batch.input, batch.target};
  };
  cells.cell("calls of the whole model with a pipeline", [&] {
    auto engine = engine_of(subject);
    const EngineBatch batch = batch_of({0, 1});
    cells.expect_usage_error([&] { engine.forward(batch.data); }, "call engine.train_batch(");
    cells.expect_usage_error([&] { engine.autocast(); }, "call engine.train_batch(");
    cells.expect_usage_error([&] { engine.model()->forward(batch.data); }, "engine.train_batch()");
    cells.expect_usage_error([&] { engine.backward(at::ones({}), 1); }, "engine.train_batch(");
    cells.expect_usage_error(
        [&] {
          engine.evaluate(points, [&](const EngineBatch& one) {
            return plain::mean_loss(engine.forward(one.data), one.target);
          });
        },
        "with a loss_of(output, target)");
  });
  cells.cell("more stages than blocks", [&] {
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"schedule", "interleaved"}});
        },
        "is 4 stages, and of the model's 3 blocks 3 have a parameter that is trained");
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"stage_layers", {2, 2}}});
        },
        "[2, 2], which is 4 blocks, and the model has 3");
  });
  cells.cell("a model that lists no blocks", [&] {
    Subject other = subject;
    other.make = make<ListsNoBlocks>;
    cells.expect_usage_error([&] { engine_of(other); }, "give it a member pipeline_blocks()");
  });
  cells.cell("a weight that stages know by different names", [&] {
    Subject other = subject;
    other.make = make<SharesUnderTwoNames>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "know as 'first.weight' and as 'head.weight'");
  });
  cells.cell("another model in stages on one rank", [&] {
    Subject other = subject;
    if (cells.rank() == 1) other.make = make<plain::Encoder>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "rank 1 of 'world' was given another pipeline than rank 0");
  });
  cells.cell("batch norms over all ranks with a pipeline", [&] {
    cells.expect_usage_error([&] { engine_of(subject, json::object(), {.sync_batchnorm = true}); },
                             "sync_batchnorm is set");
  });
  cells.cell("batches of the program's own", [&] {
    auto engine = engine_of(subject);
    cells.expect(engine.gradient_accumulation_steps() == 6, "a step has 6 passes");
    std::vector<EngineBatch> batches(5, batch_of({0, 1}));
    cells.expect_usage_error([&] { engine.train_batch(batches, plain::mean_loss); },
                             "5 batches were given, and a step has 6 passes");
    batches.push_back(batch_of({2}));
    const double loss = engine.train_batch(batches, plain::mean_loss);
    cells.expect(engine.last_step().count == 11 && loss == engine.last_step().loss,
                 "the mean over 11 samples");
    if (cells.rank() == 1) batches[0] = batch_of({0, 1, 2});
    cells.expect_usage_error([&] { engine.train_batch(batches, plain::mean_loss); },
                             "were given other batches");
    cells.expect(engine.global_steps() == 1, "a refused step counts");
  });
  cells.cell("a loss that is no number ends the pipeline on all ranks", [&] {
    auto engine = engine_of(subject);
    const auto losses = [](const at::Tensor& output, const at::Tensor&) { return output.sum(1); };
    try {
      engine.train_batch(engine.loader(points), losses);
      cells.expect(false, "nothing was thrown");
    } catch (const Error& error) {
      cells.expect(std::string(error.what()).find("it must be one number") != std::string::npos,
                   error.what());
    }
  });
}

}  // namespace

void check_engine_mistakes(Cells& cells) {
  const Subject subject = subjects().front();
  const auto engine_of = [&](const Subject& of, const json& changes = json::object()) {
    Layout layout{.name = "",
                  .keys = {{"sharding_strategy", "FULL_SHARD"}},
                  .num_axes = 1,
                  .data = cells.num_ranks()};
    layout.keys.update(changes);
    return initialize(config_of(of, layout), of.make, {.sync_batchnorm = of.has_batch_norm});
  };
  cells.cell("sums of the program's own count after a batch that did not", [&] {
    // The last pass of an epoch leaves rank 1 without a sample.
    auto engine = engine_of(subject);
    train_epochs(engine, subject, 1);
    for (std::int64_t pass = 0; pass < engine.gradient_accumulation_steps(); ++pass) {
      const data::Batch batch = plain::Points(9).batch(std::vector<std::int64_t>{1, 2});
      engine.backward(plain::mean_loss(engine.forward(batch.input), batch.target) * 2, 2);
      engine.step();
    }
    const auto wanted =
        static_cast<double>(2 * cells.num_ranks() * engine.gradient_accumulation_steps());
    cells.expect(engine.last_step().count == wanted, "the count is another one");
  });
  cells.cell("batch norms of a rank's own where it has no sample", [&] {
    Subject norms = subjects().at(1);
    norms.num_samples = 33;
    auto engine = initialize(config_of(norms, {.name = "", .data = 2}), norms.make);
    train_epochs(engine, norms, 1);
    cells.expect(engine.global_steps() == 3 && engine.last_step().count == 1,
                 "the last step is not of one sample");
    for (const NamedTensor& one : engine.dist().full_state_dict(engine.model()))
      cells.expect(one.tensor.isfinite().all().item<bool>(), one.name + " is not finite");
  });
  cells.cell("a tag that is not there", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error([&] { engine.load_checkpoint("/nowhere", "best"); },
                             "no checkpoint with the tag \"best\"");
  });
  cells.cell("another tag on one rank", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error(
        [&] { engine.save_checkpoint("/nowhere", cells.rank() == 0 ? "a" : "b"); },
        "ranks were told different things");
  });
  cells.cell("a checkpoint that cannot be written", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error([&] { engine.save_checkpoint("/proc/nowhere"); },
                             "the checkpoint of step 0 could not be written");
  });
  cells.cell("data of another size on one rank", [&] {
    auto engine = engine_of(subject);
    const auto points = std::make_shared<plain::Points>(20 + cells.rank());
    cells.expect_usage_error([&] { (void)engine.loader(points).begin(); },
                             "the data set has 21 samples");
    cells.expect_usage_error(
        [&] {
          engine.evaluate(points, [&](const EngineBatch& batch) {
            return plain::mean_loss(engine.forward(batch.data), batch.target);
          });
        },
        "the data set has 21 samples");
  });
  cells.cell("another config on one rank", [&] {
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"gradient_clipping", cells.rank()}});
        },
        "gradient_clipping is 1");
  });
  cells.cell("another model on one rank", [&] {
    Subject other = subject;
    if (cells.rank() == 1) other.make = make<plain::Recurrent>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "the model of rank 1 differs from that of rank 0");
  });
  cells.cell("dropout over a tensor axis is that of one process", [&] {
    const Subject dropout{.name = "dropout",
                          .make = make<plain::MlpWithDropout>,
                          .num_samples = 36,
                          .micro = 12,
                          .tensor_plan = subject.tensor_plan};
    const std::vector<NamedTensor> wanted = train_alone(dropout, 2);
    auto engine = initialize(config_of(dropout, layouts(dropout, 2).back()), dropout.make);
    train_epochs(engine, dropout, 2);
    expect_state(cells, engine, wanted, 1e-5);
  });
  check_pipeline_mistakes(cells);
  cells.cell("batch norms over ranks of which one has no sample", [&] {
    Subject norms = subjects().at(1);
    norms.num_samples = 33;
    auto engine = engine_of(norms);
    cells.expect_usage_error(
        [&] { (void)engine.loader(std::make_shared<plain::Points>(33)).begin(); },
        "set dataloader_drop_last, or a train_micro_batch_size_per_gpu other than 8");
  });
}

}  // namespace lockstep

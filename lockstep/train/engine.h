// Trains a module of your own as a config says, on any number of ranks, in a loop of your own:
//
//   auto engine = lockstep::initialize("config.json", [] { return MyNet(options); });
//   const auto batches = engine.loader(dataset);
//   while (engine.epoch() < 10)
//     for (const auto& batch : batches) {
//       const auto loss = loss_of(engine.forward(batch.data), batch.target);
//       engine.backward(loss);   // the mean over this batch; weighted by its number of samples
//       engine.step();           // at a step's last pass: clip, update, move the schedule on
//     }
//   engine.save_checkpoint("checkpoints");
//
// and goes on from there, on another number of ranks too:
//
//   engine.load_checkpoint("checkpoints");
//
// A loop that also trains in a pipeline, whose ranks have some of the layers each, takes whole
// steps:
//
//   while (engine.epoch() < 10) engine.train_batch(batches, loss_of);
//
// The config is that of `lockstep train` without what describes a model, its data and its loop
// (docs/config.md). The names are DeepSpeed's where it has one.
#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/data/dataset.h>
#include <lockstep/data/torch_dataset.h>
#include <lockstep/device/autocast.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/parallel/data_parallel/model_state.h>
#include <lockstep/parallel/pipeline/model_blocks.h>
#include <lockstep/train/engine_config.h>

namespace lockstep {

struct InitializeOptions {
  // Batch norms take their statistics over the samples of all ranks. Every rank then makes the
  // whole model first, also where the strategy cuts it.
  bool sync_batchnorm = false;
};

// The samples of one pass on one rank.
struct EngineBatch {
  at::Tensor data;    // [samples, …], on the rank's device
  at::Tensor target;  // [samples, …]; undefined without targets
};

// The result of a step, on all ranks together.
struct EngineStep {
  double loss = 0;  // mean over `count`
  double count = 0;
  double gradient_norm = 0;  // before clipping
  bool was_skipped = false;  // the loss or a gradient was not finite, or nothing counted
};

// The ranks that get what a model makes of a batch: with a pipeline, those of its last stage, or
// all that work on the batch. Without one, every rank has it.
enum class Outputs : std::uint8_t { none, on_last_stage, on_all_ranks };

// The result of eval_batch().
struct EngineEvaluation {
  double loss = 0;   // mean over `count`; NaN where nothing counts
  double count = 0;  // of all ranks
  // The model's output for this rank's batch, in 32 bits; undefined on ranks that do not get it.
  at::Tensor output;
};

struct LoadedCheckpoint {
  std::filesystem::path path;
  std::int64_t global_step = 0;
  std::map<std::string, std::string> client_state;
};

namespace train {

// The loss of a batch, in the two ways in which an engine computes it.
struct BatchLoss {
  // With the whole model: of a batch, and of what the model made of it.
  std::function<nn::LossSum(const EngineBatch& batch, at::Tensor& output)> of_batch;
  // In a pipeline: of what the last stage made of `samples` samples. Empty where the model gives
  // its loss another type than that.
  std::function<nn::LossSum(const at::Tensor& output, const at::Tensor& target,
                            std::int64_t samples)>
      of_output;
  bool counts_itself = false;  // something else than samples
};

class EngineCore;

// While one of these lives, an engine's backward passes leave their gradients on the rank.
class [[nodiscard]] EngineNoSync {
 public:
  EngineNoSync(std::shared_ptr<EngineCore> core, data_parallel::NoSync local)
      : core_(std::move(core)), local_(std::move(local)) {}
  EngineNoSync(EngineNoSync&&) noexcept = default;
  EngineNoSync& operator=(EngineNoSync&&) = delete;
  ~EngineNoSync();

 private:
  std::shared_ptr<EngineCore> core_;
  data_parallel::NoSync local_;
};

// An engine but for the type of its model. Engine says what its functions do.
class EngineCore : public std::enable_shared_from_this<EngineCore> {
 public:
  // `list_blocks` is called once the model is made, where it is cut into stages; empty where the
  // model is of no type that lists its blocks.
  EngineCore(const EngineConfig& config,
             const std::function<std::shared_ptr<torch::nn::Module>()>& make,
             const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
             const InitializeOptions& options);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  DistributedManager& dist();

  std::optional<device::Autocast> autocast();
  EngineNoSync no_sync();
  void backward(const at::Tensor& loss);
  void backward(const at::Tensor& loss_sum, std::int64_t count);
  void step();
  bool at_boundary() const;
  std::int64_t num_passes() const;
  std::int64_t micro_batch() const;
  std::int64_t global_batch() const;
  double learning_rate() const;
  double loss_scale() const;
  EngineStep last_step();
  std::int64_t num_steps() const;
  std::int64_t num_skipped();
  std::int64_t num_samples() const;
  std::int64_t epoch() const;

  class Epoch;
  std::shared_ptr<Epoch> begin_epoch(std::shared_ptr<const data::Dataset> dataset);
  // False at the epoch's end.
  bool next(Epoch& epoch, EngineBatch& batch);
  double evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                  const std::function<nn::LossSum(const EngineBatch& batch)>& loss_of);
  double evaluate(const std::shared_ptr<const data::Dataset>& dataset, const BatchLoss& loss);
  double train_batch(const std::shared_ptr<const data::Dataset>& dataset, const BatchLoss& loss);
  double train_batch(const std::vector<EngineBatch>& batches, const BatchLoss& loss);
  EngineEvaluation eval_batch(const EngineBatch& batch, const BatchLoss& loss, Outputs outputs);
  static nn::LossSum mean_of(const at::Tensor& loss, std::int64_t samples);

  std::filesystem::path save_checkpoint(const std::filesystem::path& folder, const std::string& tag,
                                        const std::map<std::string, std::string>& client_state);
  void wait_for_checkpoint();
  std::optional<LoadedCheckpoint> load_checkpoint(const std::filesystem::path& folder,
                                                  const std::string& tag);
  void save_model(const std::filesystem::path& file);
  void load_model(const std::filesystem::path& file);
  at::Tensor widened(at::Tensor output) const;

 private:
  friend class EngineNoSync;
  struct State;

  void end_no_sync();

  std::unique_ptr<State> state_;
};

}  // namespace train

// This rank's batches of one epoch, in the order of all ranks' together. A rank for which the last
// batch has no sample is given one that does not count.
class EngineLoader {
 public:
  class Iterator {
   public:
    const EngineBatch& operator*() const { return batch_; }
    Iterator& operator++() {
      more_ = core_->next(*epoch_, batch_);
      return *this;
    }
    bool operator==(std::nullptr_t) const { return !more_; }

   private:
    friend class EngineLoader;
    Iterator(std::shared_ptr<train::EngineCore> core, std::shared_ptr<const data::Dataset> dataset)
        : core_(std::move(core)), epoch_(core_->begin_epoch(std::move(dataset))) {
      ++*this;
    }

    std::shared_ptr<train::EngineCore> core_;
    std::shared_ptr<train::EngineCore::Epoch> epoch_;
    EngineBatch batch_;
    bool more_ = false;
  };

  // Goes on where the last step left the data: in the next epoch, or within one that was left
  // before its end or saved within.
  Iterator begin() const { return {core_, dataset_}; }
  std::nullptr_t end() const { return nullptr; }

 private:
  template <typename Model>
  friend class Engine;
  EngineLoader(std::shared_ptr<train::EngineCore> core,
               std::shared_ptr<const data::Dataset> dataset)
      : core_(std::move(core)), dataset_(std::move(dataset)) {}

  std::shared_ptr<train::EngineCore> core_;
  std::shared_ptr<const data::Dataset> dataset_;
};

namespace internal {

// A function that lists the blocks of what `Make` makes.
template <typename ListBlocks, typename Make>
concept ListsBlocksOf = std::is_invocable_r_v<std::vector<pipeline::ModelBlock>, ListBlocks&,
                                              decltype(made_in_place(std::declval<Make>()))&>;

}  // namespace internal

// A model that is spread over the ranks of a job, with its optimizer, schedule, loss scale and
// place in the data. initialize() makes one. Every rank calls the same functions at the same
// points.
//
// Ownership: copies share one engine. Threading: one thread. Failure: UsageError for what the
// caller can mend; train::TrainingStopped after a step whose loss is not finite, with the weights
// before it, out of the next function that all ranks call (on a GPU that may be in the step after);
// the errors of checkpoints and communication.
template <typename Model>
class Engine {
 public:
  // The model in its own type; what a function returned by value is a shared_ptr here. With a
  // pipeline it has the modules of this rank's stages, under their names, and no others: its own
  // forward() throws.
  Model& model() { return model_; }
  const Model& model() const { return model_; }
  // The job, for everything else: ranks, whole weights, sums over ranks.
  DistributedManager& dist() { return core_->dist(); }

  // The model's forward(), computed in 16 bits where the config says so. A tensor that it returns
  // has 32 bits, as losses want. UsageError with a pipeline, which train_batch() runs.
  template <typename... Args>
  auto forward(Args&&... args) {
    const auto cast = core_->autocast();
    auto output = model_->forward(std::forward<Args>(args)...);
    if constexpr (std::is_same_v<decltype(output), at::Tensor>)
      return core_->widened(std::move(output));
    else
      return output;
  }
  // The same for code that calls the model in another way:
  //   { const auto cast = engine.autocast(); … engine.model()->encode(x) … }
  std::optional<device::Autocast> autocast() { return core_->autocast(); }

  // An epoch of batches for this rank, as the config cuts them: at most
  // train_micro_batch_size_per_gpu samples each. Dataset: one of torch::data that gives an input
  // and a target, or a shared_ptr<const data::Dataset>.
  template <typename Data>
  EngineLoader loader(Data data) {
    return EngineLoader(core_, data::as_dataset(std::move(data)));
  }
  // Passes over the data that are complete.
  std::int64_t epoch() const { return core_->epoch(); }

  // Backward of a mean over the samples of the loader's batch. The gradient of a step is that of
  // the mean over the samples of all its batches, on all ranks, whatever their sizes.
  void backward(const at::Tensor& loss) { core_->backward(loss); }
  // Backward of a sum over `count` of what the loss counts, such as tokens; with or without a
  // loader. The gradient of a step is divided by the count of all its passes, on all ranks.
  void backward(const at::Tensor& loss_sum, std::int64_t count) {
    core_->backward(loss_sum, count);
  }
  // Ends a pass. At a step's last pass it clips and updates, moves the schedule and the loss scale
  // on, and clears the gradients; before that it does nothing.
  void step() { core_->step(); }
  // A whole step: takes its batches from the loader, in the next epoch where one is over, and runs
  // forward, backward and the update, in the order that the pipeline's schedule has where there is
  // one. Returns the step's mean loss, over the samples of all ranks, on every rank; so it waits
  // for a GPU.
  //
  // loss_of(output, target) is given what the model's forward() makes of a batch's data, and its
  // target. It returns the mean over the samples, or an nn::LossSum. In a pipeline the rank of the
  // last stage calls it.
  template <typename LossOf>
  double train_batch(const EngineLoader& loader, LossOf&& loss_of) {
    return core_->train_batch(loader.dataset_, batch_loss(loss_of));
  }
  // The same with batches of the program's own: gradient_accumulation_steps() of them, each with
  // samples. All ranks of a pipeline give the same.
  template <typename LossOf>
  double train_batch(const std::vector<EngineBatch>& batches, LossOf&& loss_of) {
    return core_->train_batch(batches, batch_loss(loss_of));
  }

  // While what it returns lives, backward() leaves gradients on each rank, as a pass beside those
  // of the step, and step() is refused. They are exchanged with those of the step's last pass, and
  // weigh as much as others.
  //
  //   { const auto local = engine.no_sync(); for (…) engine.backward(loss_of(…)); }
  //   engine.backward(loss);
  //   engine.step();
  train::EngineNoSync no_sync() { return core_->no_sync(); }
  // Whether this pass is its step's last.
  bool is_gradient_accumulation_boundary() const { return core_->at_boundary(); }

  std::int64_t gradient_accumulation_steps() const { return core_->num_passes(); }
  std::int64_t train_micro_batch_size_per_gpu() const { return core_->micro_batch(); }
  std::int64_t train_batch_size() const { return core_->global_batch(); }
  // The next step's.
  double get_lr() const { return core_->learning_rate(); }
  double loss_scale() const { return core_->loss_scale(); }
  // These wait for a GPU.
  EngineStep last_step() { return core_->last_step(); }
  double get_global_grad_norm() { return last_step().gradient_norm; }
  std::int64_t global_steps() const { return core_->num_steps(); }
  std::int64_t skipped_steps() { return core_->num_skipped(); }
  // The samples that loaders gave, to all ranks.
  std::int64_t global_samples() const { return core_->num_samples(); }

  // The mean loss over a data set, of all ranks, in eval mode and without a graph; NaN where
  // nothing counts. `loss_of` takes an EngineBatch and returns the mean over its samples, or an
  // nn::LossSum; or it takes output and target, as that of train_batch(), which pipelines need.
  template <typename Data, typename LossOf>
  double evaluate(Data data, LossOf&& loss_of) {
    if constexpr (!std::is_invocable_v<LossOf&, const EngineBatch&>) {
      return core_->evaluate(data::as_dataset(std::move(data)), batch_loss(loss_of));
    } else {
      return core_->evaluate(data::as_dataset(std::move(data)),
                             [&](const EngineBatch& batch) -> nn::LossSum {
                               using Given = std::invoke_result_t<LossOf&, const EngineBatch&>;
                               if constexpr (std::is_convertible_v<Given, nn::LossSum>) {
                                 return loss_of(batch);
                               } else {
                                 const std::int64_t size = batch.data.size(0);
                                 const at::Tensor mean = loss_of(batch);
                                 return {.sum = mean.to(at::kDouble) * size, .count = size};
                               }
                             });
    }
  }

  // The loss of one batch of each rank, in eval mode and without a graph, and the model's output.
  // `loss_of` is that of train_batch(). All ranks of a pipeline give the same batch.
  template <typename LossOf>
  EngineEvaluation eval_batch(const EngineBatch& batch, LossOf&& loss_of,
                              Outputs outputs = Outputs::on_last_stage) {
    return core_->eval_batch(batch, batch_loss(loss_of), outputs);
  }

  // Writes model, optimizer, schedule, random numbers and the place in the data, between two steps,
  // and returns where: a folder in `folder`, or in folder/<tag>, in place of what that tag had.
  // folder/latest then names it. Without a folder, in `checkpoints` of the config's `output`.
  // checkpoint.keep of those without a tag stay. UsageError on all ranks if it cannot be written;
  // checkpoints that are there stay. With checkpoint.async it is written while training goes on,
  // and a later step() or checkpoint call throws that error.
  std::filesystem::path save_checkpoint(
      const std::filesystem::path& folder = {}, const std::string& tag = "",
      const std::map<std::string, std::string>& client_state = {}) {
    return core_->save_checkpoint(folder, tag, client_state);
  }
  // Waits until a checkpoint that is still being written is complete, as the end of the last copy
  // of an engine does.
  void wait_for_checkpoint() { core_->wait_for_checkpoint(); }
  // Goes on from the checkpoint of a tag, or from the one that was saved last; the number of ranks
  // and the strategy may be others. Nothing where `folder` has none; UsageError on all ranks for a
  // tag that is not there. Without a folder, from `checkpoints` of `output`, as checkpoint.resume
  // says.
  std::optional<LoadedCheckpoint> load_checkpoint(const std::filesystem::path& folder = {},
                                                  const std::string& tag = "") {
    return core_->load_checkpoint(folder, tag);
  }

  // The model alone, whole, as a safetensors file with the module's names; and the way back, into
  // any layout.
  void save_model(const std::filesystem::path& file) { core_->save_model(file); }
  void load_model(const std::filesystem::path& file) { core_->load_model(file); }

 private:
  template <internal::ModelFactory Make, typename ListBlocks>
  requires internal::ListsBlocksOf<ListBlocks, Make>
  friend auto initialize(const EngineConfig& config, Make&& make, ListBlocks&& list_blocks,
                         const InitializeOptions& options);

  template <typename LossOf>
  train::BatchLoss batch_loss(LossOf& loss_of) {
    using Output = std::decay_t<decltype(model_->forward(std::declval<const at::Tensor&>()))>;
    using Given = std::invoke_result_t<LossOf&, const Output&, const at::Tensor&>;
    constexpr bool counts_itself = std::is_convertible_v<Given, nn::LossSum>;
    const auto of = [&loss_of](const Output& output, const at::Tensor& target,
                               std::int64_t samples) -> nn::LossSum {
      if constexpr (counts_itself)
        return loss_of(output, target);
      else
        return train::EngineCore::mean_of(loss_of(output, target), samples);
    };
    train::BatchLoss loss;
    loss.counts_itself = counts_itself;
    loss.of_batch = [this, of](const EngineBatch& batch, at::Tensor& made) {
      const Output output = forward(batch.data);
      if constexpr (std::is_same_v<Output, at::Tensor>) made = output;
      return of(output, batch.target, batch.data.size(0));
    };
    if constexpr (std::is_same_v<Output, at::Tensor>) loss.of_output = of;
    return loss;
  }

  Engine(std::shared_ptr<train::EngineCore> core, Model model)
      : core_(std::move(core)), model_(std::move(model)) {}

  std::shared_ptr<train::EngineCore> core_;
  Model model_;
};

// Joins the job that this process was launched into, makes the model with `make`, a function, and
// spreads it over the ranks as the config says. Where parameters are cut, no rank ever holds more
// than a part of them. Random numbers are seeded before `make` is called.
//
// With parallel.pipeline, `list_blocks` is given the model and returns the blocks that its stages
// are made of, in the order of its forward(). It is not needed for a torch::nn::Sequential, and for
// a model with a member pipeline_blocks() that returns them.
template <internal::ModelFactory Make, typename ListBlocks>
requires internal::ListsBlocksOf<ListBlocks, Make>
auto initialize(const EngineConfig& config, Make&& make, ListBlocks&& list_blocks,
                const InitializeOptions& options = {}) {
  using Model = decltype(internal::made_in_place(std::forward<Make>(make)));
  std::optional<Model> model;
  auto core = std::make_shared<train::EngineCore>(
      config,
      [&] {
        model.emplace(internal::made_in_place(std::forward<Make>(make)));
        return internal::module_of(*model);
      },
      [&]() -> std::vector<pipeline::ModelBlock> { return list_blocks(*model); }, options);
  return Engine<Model>(std::move(core), *std::move(model));
}
template <internal::ModelFactory Make>
auto initialize(const EngineConfig& config, Make&& make, const InitializeOptions& options = {}) {
  return initialize(
      config, std::forward<Make>(make),
      [](auto& model) { return pipeline::listed_blocks(model, internal::module_of(model)); },
      options);
}

}  // namespace lockstep

namespace lockstep::names {

using lockstep::Engine;
using lockstep::EngineBatch;
using lockstep::EngineEvaluation;
using lockstep::initialize;
using lockstep::InitializeOptions;

}  // namespace lockstep::names

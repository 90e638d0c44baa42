// The three lines that make a program train on many ranks:
//
//   auto dist  = lockstep::setup_distributed({.mode = lockstep::ParallelMode::DDP});
//   auto model = dist.wrap_model<MyNet>();   // any torch::nn::Module; its constructor's arguments
//   …                                        // the training loop, on this rank's share of the data
//
// and for a model that is too large for one of them, FSDP and an optimizer that steps on parts:
//
//   auto dist  = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP});
//   auto model = dist.wrap_model<MyNet>();
//   auto adamw = dist.make_optimizer(model, lockstep::optim::AdamWOptions{});
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/device/autocast.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/distributed/config.h>
#include <lockstep/distributed/script_module.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/parallel/data_parallel/counted_loss.h>
#include <lockstep/parallel/data_parallel/model_state.h>

namespace lockstep {

using data_parallel::MemoryReport;
using data_parallel::StateDictOptions;
using optim::GradScaler;
// For PyTorch's name: `const lockstep::autocast bf16(at::kCUDA, at::kBFloat16);`
using autocast = device::Autocast;

// One rank's view of the job. Copies refer to the same one; models stay spread over the ranks for
// as long as one of the copies lives. After that they cannot be trained, as each rank would train
// its own: backward() throws, and one whose parameters are cut cannot be used at all.
//
// Threading: one thread at a time. Failure: UsageError for what the caller can mend, before
// training starts; CommError naming the ranks where one is lost or late.
class DistributedManager {
 public:
  int rank() const;
  int world_size() const;
  int local_rank() const;
  // The rank that speaks and writes files for all.
  bool is_main() const { return rank() == 0; }

  // The share of the data that is this rank's, and the number of shares. Ranks that work together
  // by model_parallel have the same share.
  int data_rank() const;
  int data_size() const;

  // Where this rank's models and data live.
  c10::Device device() const;
  const device::DeviceManager& device_manager() const;

  // The config that setup_distributed() was given, with the sizes that follow from the number of
  // ranks.
  const DistributedConfig& config() const;
  const std::shared_ptr<comm::Communicator>& world() const;
  mesh::DeviceMesh& mesh() const;

  // Spreads a model over the ranks, as the config says: moves its tensors to the device, gives
  // every rank the weights of rank 0 or its part of them, and from then on sums gradients over
  // ranks in backward(). The model itself comes back, its type unchanged: a module holder
  // (TORCH_MODULE) or a shared_ptr.
  template <internal::SharedModel Model>
  Model wrap_model(Model model) {
    wrap(model);
    return model;
  }
  // The same of a model that is constructed here, from these arguments: a shared_ptr comes back, or
  // the holder, where that is the type. Right for any module, as it is never moved.
  //
  //   auto model = dist.wrap_model<MyNet>(options);
  template <typename Model, typename... Args>
  requires internal::BuiltFrom<Model, Args...>
  auto wrap_model(Args&&... args) {
    if constexpr (internal::PlainModule<Model>)
      return wrap_model(std::make_shared<Model>(std::forward<Args>(args)...));
    else
      return wrap_model(Model(std::forward<Args>(args)...));
  }
  // The same of what a function makes: dist.wrap_model([] { return MyNet(options); }).
  template <internal::ModelFactory Make>
  auto wrap_model(Make&& make) {
    return wrap_model(internal::made_in_place(std::forward<Make>(make)));
  }
  // The same of a model from TorchScript. Hold what comes back for as long as the model trains: run
  // the model through it, and pass it to the functions below. UsageError where it has no parameters
  // any more, as after torch.jit.freeze().
  //
  //   auto model = dist.wrap_model(torch::jit::load("model.pt"));
  [[nodiscard]] ScriptModule wrap_model(const torch::jit::Module& script);
  // The same of tensors that belong to no module, under these names. They stay the tensors that the
  // program computes with. Hold what comes back for as long as they train: it stands for them in
  // the functions below. A name with dots is that of a tensor in modules in each other; where these
  // are numbers, each is a block of its own, as in a ModuleList.
  //
  //   auto model = dist.wrap_parameters({{"blocks.0.weight", w0}, {"blocks.1.weight", w1}});
  [[nodiscard]] std::shared_ptr<torch::nn::Module> wrap_parameters(
      const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers = {}) {
    return wrap_model(internal::module_of_tensors(parameters, buffers));
  }
  // A module by value is moved into a shared_ptr. Where its constructor kept `this`, as for a
  // callback, that leads to where the module was, and to a crash.
  template <internal::PlainModule Model>
  [[deprecated("this moves the module: write wrap_model<MyNet>(arguments...), which constructs it "
               "where it stays")]] auto
  wrap_model(Model model) {
    return wrap_model(internal::share_model(std::move(model)));
  }

  // Builds a model and spreads it over the ranks as wrap_model() does, but where the strategy cuts
  // it, without any rank ever having all of it: its constructor takes no memory for large tensors,
  // and the main rank computes their initial values unit by unit, to the bit those of plain
  // construction. With a tensor axis each rank computes its parts of the layers that are cut, also
  // without memory for the whole, so its ranks must have seeded alike.
  //
  //   auto model = dist.build_model([] { return MyNet(options); });
  //
  // Its constructor may call any operators, but not read values through pointers
  // (docs/sharding.md).
  template <typename Make>
  auto build_model(Make&& make) {
    return build_model(std::forward<Make>(make), [](const auto&) {});
  }
  // The same of a model that pipelines cut into stages: `keep_stage` is called with the whole
  // model, while it has no memory, and leaves this rank's layers in it, as pipeline::split_model()
  // does.
  template <typename Make, typename KeepStage>
  auto build_model(Make&& make, KeepStage&& keep_stage) {
    std::optional<decltype(internal::made_in_place(std::forward<Make>(make)))> made;
    build(
        [&] {
          made.emplace(internal::made_in_place(std::forward<Make>(make)));
          return internal::module_of(*made);
        },
        [&] { keep_stage(*made); });
    return *std::move(made);
  }

  // Whether wrap_model() has had it.
  bool is_wrapped(const ModelRef& model) const;

  // Makes the batch norms of a model take their statistics over the samples of all ranks; before
  // wrap_model(). Returns how many there are. Each rank then needs a sample in every step; one is
  // enough (replicate::SyncBatchNorm has the details).
  int convert_sync_batchnorm(const ModelRef& model);

  // Whether a model has any such batch norm.
  bool synchronises_batch_norms(const ModelRef& model) const;

  // Gradient accumulation: hold what it returns during all passes of a step but the last. Then the
  // gradients of backward() below are divided by the samples of all passes, and are exchanged as
  // DistributedConfig::exchange_gradients says. All ranks run the same number of passes.
  //
  //   for (int pass = 0; pass < 4; ++pass) {
  //     std::optional<data_parallel::Accumulation> more;
  //     if (pass < 3) more.emplace(dist.accumulate(model));
  //     dist.backward(model, loss_sum, count);
  //   }
  data_parallel::Accumulation accumulate(const ModelRef& model);
  // While the guard lives, backward() leaves gradients on the rank, whole, with every strategy.
  data_parallel::NoSync no_sync(const ModelRef& model);

  // Backward of a loss that is a sum over `count` samples: gradients are divided by the samples of
  // all ranks, so that ranks may have different numbers of them, or none; but see
  // every_rank_computes().
  void backward(const ModelRef& model, const at::Tensor& loss_sum, std::int64_t count);
  // The same of a step whose backward passes, of several micro-batches, `passes` runs; it returns
  // the sum of their losses. For pipelines.
  void backward_passes(const ModelRef& model, const std::function<at::Tensor()>& passes,
                       std::int64_t count) {
    backward_passes(model, [&] { return data_parallel::CountedSum{passes(), count}; });
  }
  // The same where only the passes tell over how many samples or tokens the losses are.
  void backward_passes(const ModelRef& model,
                       const std::function<data_parallel::CountedSum()>& passes);

  // The samples of all ranks and their mean loss, as the last exchanged backward() above gave them.
  const data_parallel::StepTotals& totals(const ModelRef& model);

  // Whether parameters are cut among ranks. All of them then run the model whenever one does, in
  // training and evaluation; a rank that has no samples takes any, and passes backward() their loss
  // times 0 and a count of 0.
  bool every_rank_computes(const ModelRef& model);

  // An optimizer for the model's parameters, wherever they lie: with parts of them on each rank, it
  // steps on this rank's and its state is theirs. The manager and the model outlive it. Weights
  // decay as the rule says (biases and norms do not).
  std::unique_ptr<optim::Optimizer> make_optimizer(
      const ModelRef& model, const optim::OptimizerOptions& options, double weight_decay = 0,
      optim::DecayRule rule = optim::DecayRule::matrices);
  // The same for groups of the model's own parameters.
  std::unique_ptr<optim::Optimizer> make_optimizer(const ModelRef& model,
                                                   const optim::OptimizerOptions& options,
                                                   std::vector<optim::ParameterGroup> groups);

  // Clips by the norm of the whole model's gradients, as optim::clip_gradients does.
  optim::ClipResult clip_gradients(const ModelRef& model, double max_norm);
  // The norm of the whole model's gradients, as one Double on their device: nothing waits for a
  // GPU. With it, clipping is part of the step:
  //
  //   const at::Tensor factor = optim::clip_factor(dist.gradient_norm(model), 1.0);
  //   adamw->step(learning_rate, optim::StepFactor(factor));
  at::Tensor gradient_norm(const ModelRef& model);

  // With a scaled loss (GradScaler), once all of a step's passes are done and before clipping:
  // divides the gradients by the scale, moves the scale on, and says whether the optimizer is to
  // step. Not if a gradient overflowed on any rank; all ranks are given the same answer. UsageError
  // on all of them as GradScaler::update().
  //
  //   dist.backward(model, scaler.scale(loss_sum), count);
  //   if (dist.unscale_gradients(model, scaler)) adamw->step(learning_rate);
  [[nodiscard]] bool unscale_gradients(const ModelRef& model, optim::GradScaler& scaler);

  // A copy of the whole gradient of a parameter, on every rank; undefined where there is none. Of
  // one that a tensor axis cuts, this rank's part. Every rank that has the parameter calls it.
  at::Tensor full_gradient(const ModelRef& model, const std::string& name);

  // A copy of every parameter and buffer, whole, on the main rank (the options say otherwise),
  // gathered unit by unit where they are cut. Every rank calls it.
  std::vector<NamedTensor> full_state_dict(const ModelRef& model,
                                           const StateDictOptions& options = {});
  // The reverse, from the main rank's. UsageError on every rank for what does not fit.
  void load_full_state_dict(const ModelRef& model, const std::vector<NamedTensor>& state);

  // The same for an optimizer of make_optimizer().
  std::vector<NamedTensor> full_optimizer_state(const ModelRef& model,
                                                const optim::Optimizer& optimizer,
                                                const StateDictOptions& options = {});
  void load_full_optimizer_state(const ModelRef& model, optim::Optimizer& optimizer,
                                 const std::vector<NamedTensor>& state);

  // This rank's parts of the model's parameters and buffers, under their names: the memory itself,
  // for checkpoints. A program that has written to it calls held_state_written() on every rank.
  std::vector<mesh::HeldTensor> held_state(const ModelRef& model);
  void held_state_written(const ModelRef& model);
  // The same of an optimizer of make_optimizer(), which takes what was written by load_state(). Its
  // counts of steps are copies.
  std::vector<mesh::HeldTensor> held_optimizer_state(const ModelRef& model,
                                                     const optim::Optimizer& optimizer);

  // While what it returns lives, parameters that are cut are whole on every rank, for code that
  // reads them through data_ptr(). Every rank calls it.
  std::shared_ptr<void> full_parameters(const ModelRef& model);

  // How the model lies on the ranks: its units, their sizes and where they are.
  std::string describe(const ModelRef& model);
  // The memory that it takes on this rank.
  MemoryReport memory_report(const ModelRef& model);

  // Numbers summed over all ranks, for metrics.
  std::vector<double> sum(std::vector<double> values) const;
  double sum(double value) const { return sum(std::vector{value}).front(); }
  // The same over ranks with other samples, or parts of them, where those that work together on one
  // have the same numbers.
  std::vector<double> sum_over_data(std::vector<double> values) const;
  double mean(double value) const { return sum(value) / world_size(); }

  // The main rank's text, on every rank.
  std::string broadcast(const std::string& text) const;

  void barrier() const;

 private:
  friend DistributedManager setup_distributed(const DistributedConfig& config);
  struct State;

  explicit DistributedManager(std::shared_ptr<State> state) : state_(std::move(state)) {}

  void wrap(const ModelRef& model);
  void build(const std::function<std::shared_ptr<torch::nn::Module>()>& make,
             const std::function<void()>& keep_stage);

  std::shared_ptr<State> state_;
};

// Joins the job that this process was launched into (lockstep run, torchrun, mpirun, srun); without
// a launcher it is a job of one rank. Every rank calls it once, with the same config.
DistributedManager setup_distributed(const DistributedConfig& config = {});

}  // namespace lockstep

// The names that a program writes most, without the namespaces of the parts: `using namespace
// lockstep` brings lockstep::nn, optim and data, and leaves `nn` ambiguous beside `namespace nn =
// torch::nn` or `using namespace torch`. `using namespace lockstep::names` goes with both. Other
// headers for programs add theirs.
namespace lockstep::names {

using lockstep::CommError;
using lockstep::DistributedConfig;
using lockstep::DistributedManager;
using lockstep::GradScaler;
using lockstep::ParallelMode;
using lockstep::setup_distributed;
using lockstep::ShardingStrategy;
using lockstep::StateDictOptions;
using lockstep::UsageError;

}  // namespace lockstep::names

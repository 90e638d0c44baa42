// The three lines that make a program train on many ranks:
//
//   auto dist  = lockstep::setup_distributed({.mode = lockstep::ParallelMode::DDP});
//   auto model = dist.wrap_model(MyNet());   // any torch::nn::Module
//   …  the training loop, with this rank's share of the data …
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/distributed/config.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>

namespace lockstep {

// One rank's view of the job. Copies refer to the same one; models stay data parallel for as long
// as one of the copies lives.
//
// Threading: one thread at a time. Failure: UsageError for what the caller can mend, before
// training starts; CommError naming the ranks where one is lost or late.
class DistributedManager {
 public:
  int rank() const { return world()->rank(); }
  int world_size() const { return world()->size(); }
  int local_rank() const;
  // The rank that speaks and writes files for all.
  bool is_main() const { return rank() == 0; }

  // Where this rank's models and data live.
  c10::Device device() const;
  const device::DeviceManager& device_manager() const;

  const std::shared_ptr<comm::Communicator>& world() const;
  mesh::DeviceMesh& mesh() const;

  // Spreads a model over the ranks: moves it to the device, gives every rank the weights of rank 0,
  // and from then on sums gradients over ranks in backward(). The model itself comes back, its type
  // unchanged: a module holder (TORCH_MODULE), a shared_ptr, or a module by value, which becomes a
  // shared_ptr.
  template <typename Model>
  auto wrap_model(Model model) {
    auto shared = internal::share_model(std::move(model));
    wrap(internal::module_of(shared));
    return shared;
  }

  // Whether wrap_model() has had it.
  template <typename Model>
  bool is_wrapped(const Model& model) const {
    return find(internal::module_of(model).get()) != nullptr;
  }

  // Makes the batch norms of a model take their statistics over the samples of all ranks; before
  // wrap_model(). Returns how many there are. Each rank then needs a sample in every step; one is
  // enough (replicate::SyncBatchNorm has the details).
  template <typename Model>
  int convert_sync_batchnorm(const Model& model) {
    return synchronise_batch_norms(internal::module_of(model));
  }

  // Whether a model has any such batch norm.
  template <typename Model>
  bool synchronises_batch_norms(const Model& model) const {
    return has_synchronised_batch_norms(internal::module_of(model).get());
  }

  // While the guard lives, backward() leaves gradients on the rank: gradient accumulation.
  template <typename Model>
  auto no_sync(const Model& model) {
    return data_parallel(internal::module_of(model).get()).no_sync();
  }

  // Backward of a loss that is a sum over `count` samples: gradients are divided by the samples of
  // all ranks, so that ranks may have different numbers of them, or none.
  template <typename Model>
  void backward(const Model& model, const at::Tensor& loss_sum, std::int64_t count) {
    data_parallel(internal::module_of(model).get()).backward(loss_sum, count);
  }

  // The samples of all ranks and their mean loss, as the last exchanged backward() above gave them.
  template <typename Model>
  const data_parallel::StepTotals& totals(const Model& model) {
    return data_parallel(internal::module_of(model).get()).totals();
  }

  // Numbers summed over all ranks, for metrics.
  std::vector<double> sum(std::vector<double> values) const;
  double sum(double value) const { return sum(std::vector{value}).front(); }
  double mean(double value) const { return sum(value) / world_size(); }

  // The main rank's text, on every rank.
  std::string broadcast(const std::string& text) const;

  void barrier() const;

 private:
  friend DistributedManager setup_distributed(const DistributedConfig& config);
  struct State;

  explicit DistributedManager(std::shared_ptr<State> state) : state_(std::move(state)) {}

  void wrap(const std::shared_ptr<torch::nn::Module>& module);
  int synchronise_batch_norms(const std::shared_ptr<torch::nn::Module>& module);
  bool has_synchronised_batch_norms(const torch::nn::Module* module) const;
  c10::Device device_for_numbers() const;
  replicate::DistributedDataParallel* find(const torch::nn::Module* module) const;
  replicate::DistributedDataParallel& data_parallel(const torch::nn::Module* module);

  std::shared_ptr<State> state_;
};

// Joins the job that this process was launched into (lockstep run, torchrun, mpirun, srun); without
// a launcher it is a job of one rank. Every rank calls it once, with the same config.
DistributedManager setup_distributed(const DistributedConfig& config = {});

}  // namespace lockstep

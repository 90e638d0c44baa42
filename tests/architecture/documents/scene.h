// The things that the pages' examples assume: a model, a job, a batch. None of them is defined, and
// an example's own declarations hide those here. It includes no header of Lockstep, because the
// headers that docs/coming-from.md names come first and must be enough.
#pragma once

#include <iostream>
#include <map>
#include <memory>
#include <vector>

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/torch.h>

namespace scene {

namespace plan = lockstep::plan;

struct MyNetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& input);
};
TORCH_MODULE(MyNet);

// A function of the model's output and a target, or that function's result.
struct Loss : torch::Tensor {
  template <typename... Inputs>
  torch::Tensor operator()(const Inputs&... inputs) const;
};

// The objects of a job.
extern lockstep::DistributedManager dist;
extern std::shared_ptr<lockstep::comm::Communicator> world, group;
extern lockstep::mesh::DeviceMesh mesh;
extern std::shared_ptr<lockstep::nn::TensorAxis> axis;
extern int peer;
extern lockstep::Engine<MyNet> engine;
torch::Tensor loss_of(const lockstep::EngineBatch& batch);
extern lockstep::DistributedTrainer<MyNet> trainer;
struct Callback {  // of a trainer
  template <typename Event>
  lockstep::Then operator()(const Event& event) const;
};
extern Callback f;

// The model in training.
extern torch::nn::Sequential model;
extern std::shared_ptr<torch::nn::Module> mlp, module;
extern MyNet net, block;
extern lockstep::activations::Policy policy;
extern torch::Tensor (*fn)(const torch::Tensor&);
extern lockstep::tensor::ParallelizedModule cut;
extern std::shared_ptr<lockstep::optim::Optimizer> optimizer, adamw;
extern lockstep::GradScaler scaler;
extern lockstep::pipeline::Pipeline pipe;
extern std::int64_t hidden_size, num_heads;

// The training data.
extern lockstep::data::DataLoader loader;
extern std::shared_ptr<const lockstep::data::Dataset> dataset, training_set, validation_set,
    test_set;
extern std::string folder, tag, text;
extern std::map<std::string, std::string> client_state;
extern std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
extern torch::Tensor x, t, whole, input, target, loss_sum;
extern Loss loss;
extern std::int64_t count, n, epoch, step, length;
extern lockstep::nn::SequencePart part;
extern std::vector<lockstep::NamedTensor> state;
extern double weight_decay, learning_rate, value;
torch::Tensor make_batch();
torch::Tensor heights_at(const torch::Tensor& points);
int train(const lockstep::DistributedManager& dist);
void warn(const std::string& text);

}  // namespace scene

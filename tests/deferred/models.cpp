#include "models.h"

#include <torch/nn.h>
#include <torch/types.h>

namespace lockstep::deferred::testing {

namespace {

namespace nn = torch::nn;

template <typename Module, typename... Options>
Model stock(const std::string& name, const Options&... options) {
  return {name, [=] { return std::make_shared<Module>(options...); }};
}

// A module whose constructor is a function.
class Custom : public nn::Module {
 public:
  explicit Custom(const std::function<void(Custom&)>& construct) { construct(*this); }
  using nn::Module::register_buffer;
  using nn::Module::register_module;
  using nn::Module::register_parameter;
};

Model custom(const std::string& name, std::function<void(Custom&)> construct) {
  return {name, [=] { return std::make_shared<Custom>(construct); }};
}

// A tensor that stands for a number, as operators use them internally: multiplied with integers it
// gives floats, where an ordinary tensor of doubles would give doubles.
at::Tensor number(double value) {
  at::Tensor tensor = torch::scalar_tensor(value, torch::kDouble);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Model plain_in_part(Model model) {
  model.all_deferred = false;
  return model;
}

void initialise(Custom& module, const std::function<void(at::Tensor)>& init,
                at::IntArrayRef sizes = {150, 160}) {
  init(module.register_parameter("weight", torch::empty(sizes)));
}

}  // namespace

std::vector<Model> models() {
  return {
      stock<nn::LinearImpl>("Linear", 301, 157),
      stock<nn::BilinearImpl>("Bilinear", 31, 29, 37),
      stock<nn::EmbeddingImpl>("Embedding", 1001, 67),
      stock<nn::EmbeddingImpl>("Embedding with padding",
                               nn::EmbeddingOptions(997, 65).padding_idx(3)),
      stock<nn::EmbeddingBagImpl>("EmbeddingBag", 997, 65),
      stock<nn::LayerNormImpl>("LayerNorm", nn::LayerNormOptions({130, 140})),
      stock<nn::GroupNormImpl>("GroupNorm", nn::GroupNormOptions(10, 20000)),
      stock<nn::BatchNorm2dImpl>("BatchNorm", 20000),
      stock<nn::InstanceNorm1dImpl>(
          "InstanceNorm", nn::InstanceNorm1dOptions(20000).affine(true).track_running_stats(true)),
      stock<nn::Conv1dImpl>("Conv1d", nn::Conv1dOptions(50, 70, 7)),
      stock<nn::Conv2dImpl>("Conv2d", nn::Conv2dOptions(33, 70, 3).bias(false)),
      stock<nn::ConvTranspose3dImpl>("ConvTranspose3d", nn::ConvTranspose3dOptions(16, 17, 5)),
      stock<nn::LSTMImpl>("LSTM", nn::LSTMOptions(90, 101).num_layers(2).bidirectional(true)),
      stock<nn::GRUImpl>("GRU", nn::GRUOptions(90, 101).num_layers(2)),
      stock<nn::LSTMCellImpl>("LSTMCell", 90, 101),
      stock<nn::MultiheadAttentionImpl>("MultiheadAttention",
                                        nn::MultiheadAttentionOptions(160, 4)),
      stock<nn::MultiheadAttentionImpl>(
          "MultiheadAttention with other keys",
          nn::MultiheadAttentionOptions(160, 4).kdim(150).vdim(140).add_bias_kv(true)),
      // Its options make the layer that it clones.
      {"TransformerEncoder",
       [] {
         const nn::TransformerEncoderLayerOptions layer(132, 4);
         return nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)).ptr();
       }},
      stock<nn::TransformerImpl>("Transformer", nn::TransformerOptions(132, 4, 1, 1)),
      {"Sequential",
       [] {
         return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(64, 64, 5)), nn::BatchNorm2d(64),
                               nn::ReLU(), nn::Linear(200, 200), nn::Dropout(0.1))
             .ptr();
       }},

      custom("parameters of its own",
             [](Custom& self) {
               self.register_parameter("scaled", torch::randn({200, 210}) * 0.02);
               self.register_parameter("uniform", torch::rand({30000}));
               self.register_parameter("zeros", torch::zeros({300, 100}));
               self.register_parameter("ones", torch::ones({300, 100}));
               self.register_parameter("full", torch::full({30000}, 0.3));
               self.register_parameter("frozen", torch::randn({200, 200}), false);
               self.register_parameter("double", torch::randn({100, 203}, torch::kDouble));
               self.register_parameter("half", torch::zeros({200, 210}, torch::kHalf).uniform_());
               self.register_parameter("sum", torch::rand({200, 100}) + torch::randn({100}));
               self.register_parameter("like", torch::randn_like(torch::zeros({200, 100})));
               self.register_parameter("transposed", torch::randn({200, 101}).t());
             }),
      custom("buffers",
             [](Custom& self) {
               self.register_buffer("mask", torch::ones({200, 200}).tril());
               self.register_buffer("noise", torch::randn({200, 100}));
               self.register_buffer("labels", torch::randint(0, 1000, {100, 100}));
               self.register_buffer("wide", torch::randint(0, std::int64_t{1} << 40, {100, 100}));
               self.register_buffer("flags", torch::zeros({300, 300}, torch::kBool));
               self.register_buffer("small", torch::arange(10));
               self.register_buffer(
                   "stacked", torch::stack({torch::rand({200, 100}), torch::zeros({200, 100})}));
               self.register_buffer("joined",
                                    torch::cat({torch::rand({200, 100}), torch::ones({100, 100})}));
               self.register_buffer("products", torch::randint(0, 9, {200, 100}).mul(number(2.5)));
               self.register_buffer("angles", torch::rand({200, 100}).mul(3).sin());
             }),
      // One kernel makes them, and allocates their memory itself.
      plain_in_part(custom("ranges",
                           [](Custom& self) {
                             self.register_buffer("range", torch::arange(20000));
                             self.register_buffer("reals", torch::arange(0, 20000, 0.7));
                             self.register_buffer("even", torch::linspace(0, 1, 20000));
                             self.register_buffer("identity", torch::eye(150));
                             self.register_buffer("order", torch::randperm(20000));
                             self.register_buffer(
                                 "angles",
                                 torch::outer(torch::arange(200), torch::rand({200})).sin());
                           })),
      custom("tied weights",
             [](Custom& self) {
               auto embedding = self.register_module("embedding", nn::Embedding(300, 100));
               self.register_parameter("head", embedding->weight);
               auto other = self.register_module("other", nn::Linear(100, 300));
               other->weight.set_data(embedding->weight.detach());
               self.register_buffer("view", embedding->weight.detach().slice(0, 10, 290));
             }),
      custom("apply(normal_)",
             [](Custom& self) {
               self.register_module("linear", nn::Linear(200, 201));
               self.register_module("embedding", nn::Embedding(300, 100));
               self.apply([](nn::Module& module) {
                 const torch::NoGradGuard no_grad;
                 for (auto& parameter : module.parameters(false)) parameter.normal_(0, 0.02);
               });
             }),
      custom("16 bits",
             [](Custom& self) {
               self.register_module("linear", nn::Linear(300, 201));
               self.register_module("norm", nn::BatchNorm1d(40000));
               self.to(torch::kBFloat16);
             }),
      custom("xavier_uniform_",
             [](Custom& self) { initialise(self, [](auto t) { nn::init::xavier_uniform_(t); }); }),
      custom(
          "xavier_normal_",
          [](Custom& self) { initialise(self, [](auto t) { nn::init::xavier_normal_(t, 2); }); }),
      custom("kaiming_normal_",
             [](Custom& self) { initialise(self, [](auto t) { nn::init::kaiming_normal_(t); }); }),
      custom("orthogonal_",
             [](Custom& self) { initialise(self, [](auto t) { nn::init::orthogonal_(t); }); }),
      custom("orthogonal_ of a tall one",
             [](Custom& self) {
               initialise(self, [](auto t) { nn::init::orthogonal_(t, 2); }, {300, 70});
             }),
      custom("eye_", [](Custom& self) { initialise(self, [](auto t) { nn::init::eye_(t); }); }),
      custom("dirac_",
             [](Custom& self) {
               initialise(self, [](auto t) { nn::init::dirac_(t); }, {60, 50, 9});
             }),
      custom("sparse_",
             [](Custom& self) { initialise(self, [](auto t) { nn::init::sparse_(t, 0.3); }); }),
      custom("distributions",
             [](Custom& self) {
               const torch::NoGradGuard no_grad;
               initialise(self, [](auto t) { t.exponential_(2).log_(); });
               self.register_buffer("cauchy", torch::empty({20000}).cauchy_());
               self.register_buffer("log_normal", torch::empty({20000}).log_normal_());
               self.register_buffer("geometric", torch::empty({20000}).geometric_(0.3));
               self.register_buffer("bernoulli", torch::empty({20000}).bernoulli_(0.3));
             }),
      custom("parts and views",
             [](Custom& self) {
               const torch::NoGradGuard no_grad;
               auto weight = self.register_parameter("weight", torch::zeros({200, 210}));
               weight.slice(0, 0, 100).normal_();
               weight.t().slice(0, 0, 50).uniform_();
               weight[150].normal_();  // small
               weight.view({-1}).slice(0, 3, 9).fill_(7);
               weight.mul_(weight.detach().clone().abs().add_(1));
               auto other = self.register_parameter("other", torch::empty_like(weight));
               other.copy_(weight);
               weight.add_(1);  // `other` has the value from before
               self.register_buffer("copy", weight.clone());
             }),
      custom("values that are read",
             [](Custom& self) {
               const torch::NoGradGuard no_grad;
               auto weight = self.register_parameter("weight", torch::randn({200, 200}));
               weight.div_(weight.norm().item<float>());
               if (weight[0][0].item<float>() > 0) weight.neg_();
               weight.mul_(1 / weight.abs().max());
               self.register_buffer("largest", weight.argmax(1));
             }),
      plain_in_part(custom("shapes that depend on values",
                           [](Custom& self) {
                             auto noise = torch::randn({200, 200});
                             self.register_buffer("positive", noise.masked_select(noise > 0));
                             self.register_buffer("where", torch::nonzero(noise > 0));
                           })),
      custom("values that change after they were read",
             [](Custom& self) {
               const torch::NoGradGuard no_grad;
               auto small = torch::full({200}, 3.0);
               auto weight = self.register_parameter("weight", torch::zeros({200, 200}));
               weight.copy_(small);
               weight[0].copy_(weight[1]);
               small.fill_(4);
               weight[2].copy_(small);
             }),
      // The number of random numbers does not follow from the shape, so these are drawn at once.
      plain_in_part(
          custom("random numbers that depend on a tensor",
                 [](Custom& self) {
                   const torch::NoGradGuard no_grad;
                   auto chances = torch::rand({200, 200});
                   self.register_buffer("flags", torch::zeros({200, 200}).bernoulli_(chances));
                   self.register_buffer("drawn", torch::bernoulli(chances));
                   self.register_buffer("normal", at::normal(chances, 2.0));
                   self.register_buffer("dropped", torch::dropout(chances, 0.5, true));
                   self.register_buffer("after", torch::rand({200, 200}));
                 })),
      plain_in_part(
          custom("a generator of its own",
                 [](Custom& self) {
                   auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
                   self.register_buffer("a", torch::empty({20000}).normal_(0, 1, generator));
                   self.register_buffer("b", torch::empty({20000}).uniform_(0, 1, generator));
                 })),
      plain_in_part(
          custom("gradients in the constructor",
                 [](Custom& self) {
                   auto weight = self.register_parameter("weight", torch::randn({200, 200}));
                   (weight * weight).sum().backward();
                   self.register_buffer("gradient", weight.grad());
                 })),
      plain_in_part(custom("other sizes",
                           [](Custom& self) {
                             auto grown = torch::randn({200, 200});
                             grown.resize_({100, 200}).resize_({300, 200}).slice(0, 200).zero_();
                             grown.slice(0, 100).zero_();
                             self.register_buffer("grown", grown);
                             auto output = torch::zeros({200, 200});
                             self.register_buffer("copy", output.clone());
                             torch::arange_out(output, 30000);
                             self.register_buffer("output", output);
                           })),
      plain_in_part(
          custom("channels last",
                 [](Custom& self) {
                   self.register_buffer(
                       "direct",
                       torch::zeros({20, 30, 9, 9}, torch::MemoryFormat::ChannelsLast).normal_());
                   self.register_parameter(
                       "converted",
                       torch::randn({20, 30, 9, 9}).contiguous(torch::MemoryFormat::ChannelsLast));
                 })),
      // A table is filled element by element, as sinusoidal positions often are.
      plain_in_part(custom("values written through a pointer",
                           [](Custom& self) {
                             auto table = torch::zeros({200, 100});
                             auto element = table.accessor<float, 2>();
                             for (int i = 0; i < 200; ++i)
                               element[i][i % 100] = static_cast<float>(i);
                             self.register_buffer("table", table);
                             auto other = torch::empty({200, 100});
                             float* const values = other.data_ptr<float>();
                             for (int i = 0; i < 20000; ++i) values[i] = static_cast<float>(i % 7);
                             self.register_buffer("other", other.mul(2));
                           })),
  };
}

}  // namespace lockstep::deferred::testing

#include "behaviour.h"

#include <array>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>

namespace lockstep::replicate {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

// Two layers, used in the order that the caller chooses.
struct TwoImpl : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  explicit TwoImpl(std::int64_t width = 4) {
    first = register_module("first", nn::Linear(width, width));
    second = register_module("second", nn::Linear(width, width));
  }
};
TORCH_MODULE(Two);

// The layer's output, computed a second time in backward by a backward inside of it, which is how
// activations are recomputed.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            nn::LinearImpl* layer) {
    context->save_for_backward({input});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return layer->forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const c10::AutoGradMode grad(true);
    auto* const layer = reinterpret_cast<nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    layer->forward(input).backward(gradients[0]);
    return {input.grad(), at::Tensor()};
  }
};

// Counts operators of this thread, on which backward passes on the CPU run.
thread_local int num_operators = 0;
std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction&) {
  ++num_operators;
  return nullptr;
}

void check_agreement(Cells& cells) {
  cells.cell("a shape that differs is named on every rank", [&] {
    Two model(cells.rank() == 2 ? 5 : 4);
    cells.expect_usage_error(
        [&] { DistributedDataParallel(*model, cells.group()); },
        "the model of rank 2 differs from that of rank 0, which has 4 tensors where it has 4: "
        "tensor 0 is 'first.weight' (Float of shape [4, 4]) on rank 0 and 'first.weight' (Float of "
        "shape [5, 5]) on rank 2");
  });
  cells.cell("a tensor that is missing is named on every rank", [&] {
    nn::Sequential model(nn::Linear(2, 2));
    if (cells.rank() == 1) model->push_back(nn::Linear(2, 3));
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "tensor 2 is nothing on rank 0 and '1.weight'");
  });
  cells.cell("what is frozen must be frozen everywhere", [&] {
    Two model;
    if (cells.rank() == 1) model->first->weight.requires_grad_(false);
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "(Float of shape [4, 4], not trained)");
  });
  cells.cell("a module without parameters is refused", [&] {
    nn::Sequential model;
    cells.expect_usage_error([&] { DistributedDataParallel(*model, cells.group()); },
                             "there is nothing to train");
  });
  cells.cell("every rank starts from the weights of rank 0", [&] {
    torch::manual_seed(static_cast<std::uint64_t>(cells.rank()));
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    torch::manual_seed(0);
    const Two expected;
    cells.expect_same(model->second->weight, expected->second->weight, "the weight");
  });
}

void check_gradients(Cells& cells) {
  cells.cell("sparse gradients are refused", [&] {
    nn::Embedding model(nn::EmbeddingOptions(5, 3).sparse(true));
    DistributedDataParallel parallel(*model, cells.group());
    cells.expect_usage_error([&] { model->forward(at::arange(2)).sum().backward(); },
                             "the gradient of 'weight' is sparse");
  });
  cells.cell("gradients that are part of a graph are refused", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor loss = model->first(at::ones({1, 4})).pow(2).sum();
    cells.expect_usage_error([&] { loss.backward({}, c10::nullopt, /*create_graph=*/true); },
                             "create_graph");
  });
  cells.cell("gradients that are part of a graph stay on their rank", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor bias = model->first->bias;
    const auto local = parallel.no_sync();
    bias.pow(3).sum().backward({}, c10::nullopt, /*create_graph=*/true);
    cells.expect(bias.grad().allclose(3 * bias.pow(2)), "the gradient");
  });
  cells.cell("gradients that were not zeroed are noticed", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    parallel.backward(loss(), 1);
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "call zero_grad()");
  });
  cells.cell("gradients that were zeroed behind autograd's back are zero", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    for (int step = 0; step < 3; ++step) {
      parallel.backward(model->second(model->first(at::ones({1, 4}))).sum(), 1);
      cells.expect_same(model->second->bias.grad(), at::ones({4}), "the gradient");
      for (const at::Tensor& parameter : model->parameters()) parameter.grad().data().zero_();
    }
  });
  cells.cell("gradients that share memory are summed each on its own", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    // Both biases get the same gradient, that of their sum, as views of it.
    const auto loss = [&] {
      const at::Tensor sum = model->first->bias.unsqueeze(0) + model->second->bias.unsqueeze(0);
      return (sum * (cells.rank() + 1)).sum();
    };
    {
      const auto local = parallel.no_sync();
      parallel.backward(loss(), 1);
    }
    parallel.backward(loss(), 1);
    for (const nn::Linear& layer : {model->first, model->second})
      cells.expect_same(layer->bias.grad(), at::full({4}, 2.0f), "the gradient");
  });
  cells.cell("a large gradient of one user is summed where autograd put it", [&] {
    nn::Linear model(128, 128);
    DistributedDataParallel parallel(*model, cells.group());
    const void* arrived = nullptr;
    model->weight.register_hook([&](const at::Tensor& gradient) { arrived = gradient.data_ptr(); });
    parallel.backward(model(at::ones({2, 128})).sum(), 2);
    cells.expect(model->weight.grad().data_ptr() == arrived, "it was copied");
  });
  cells.cell("a pass that ended in an exception is not counted in silence", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    const auto local = parallel.no_sync();
    const at::Tensor hidden = model->first(at::ones({1, 4}));
    hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("no memory"); });
    try {
      parallel.backward(hidden.sum(), 1);
      cells.expect(false, "the exception");
    } catch (const std::exception&) {
    }
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "ended in an exception");
  });
  cells.cell("counted and plain passes do not add up", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    const auto local = parallel.no_sync();
    loss().backward();
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "they do not add up");
    model->zero_grad();
    parallel.backward(loss(), 1);
    cells.expect_usage_error([&] { loss().backward(); }, "they do not add up");
  });
  cells.cell("gradients that were not zeroed are noticed in a later step too", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    for (int step = 0; step < 3; ++step) {
      parallel.backward(loss(), 1);
      for (const at::Tensor& parameter : model->parameters()) {
        parameter.mutable_grad().zero_();
        if (step == 1) parameter.mutable_grad().reset();
      }
    }
    parallel.backward(loss(), 1);
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "call zero_grad()");
  });
  cells.cell("a backward inside of the backward is part of the same pass", [&] {
    const at::Tensor ones = at::ones({2, 4});
    torch::manual_seed(1);
    Two alone;
    (alone->second(alone->first(ones)).pow(2).sum() / 2).backward();
    torch::manual_seed(1);
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    parallel.backward(Again::apply(model->first(ones), model->second.get()).pow(2).sum(), 2);
    cells.expect(parallel.gradients().num_exchanges() == 1, "more than one exchange");
    for (const auto& item : model->named_parameters())
      cells.expect(item.value().grad().allclose(alone->named_parameters()[item.key()].grad()),
                   "the gradient of " + item.key());
  });
  cells.cell("a loss over one model's samples that reaches another model is refused", [&] {
    Two encoder;
    Two decoder;
    const CountedPass pass = std::make_shared<CountedPass::element_type>(nullptr);
    DistributedDataParallel one(*encoder, cells.group(), {}, {.counted_pass = pass});
    DistributedDataParallel other(*decoder, cells.group(), {}, {.counted_pass = pass});
    const auto loss = [&] { return decoder->first(encoder->first(at::ones({1, 4}))).sum(); };
    cells.expect_usage_error([&] { other.backward(loss(), 1); },
                             "register both in one module and wrap that");
  });
  cells.cell("what was frozen and is trained later is refused", [&] {
    Two model;
    model->second->weight.requires_grad_(false);
    DistributedDataParallel parallel(*model, cells.group());
    model->second->weight.requires_grad_(true);
    const auto loss = [&] { return model->second(model->first(at::ones({1, 4}))).sum(); };
    cells.expect_usage_error([&] { loss().backward(); }, "'second.weight' was frozen");
    cells.expect_usage_error([&] { parallel.backward(loss(), 1); }, "'second.weight' was frozen");
  });
  cells.cell("more samples than 16 bits can count", [&] {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      Two model;
      model->to(dtype);
      DistributedDataParallel parallel(*model, cells.group());
      parallel.backward((model->first->bias * 7).sum(at::kFloat), 70'001);
      cells.expect_same(model->first->bias.grad(), at::full({4}, 21.0f / 210'003).to(dtype),
                        "the gradient over 3 ranks");
    }
  });
  cells.cell("without a loss or with a vector of losses", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    cells.expect_usage_error([&] { parallel.backward({}, 3); }, "over 3 samples without a loss");
    cells.expect_usage_error(
        [&] {
          parallel.backward(model->first(at::ones({1, 4})), 1);
        },
        "of shape [1, 4]");
  });
  cells.cell("a loss that meets no parameter does not keep the others waiting", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor ones = at::ones({1, 4});
    parallel.backward(cells.rank() == 1 ? at::zeros({}) : model->first(ones).sum(), 1);
    cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0f) / 3, "the gradient");
    cells.expect_same(model->second->bias.grad(), {}, "the gradient of what no rank used");
  });
}

void check_memory(Cells& cells) {
  cells.cell("small gradients stay in their bucket, and leave it with the ranks", [&] {
    Two model;
    at::Tensor gradient;
    {
      DistributedDataParallel parallel(*model, cells.group());
      const auto step = [&] {
        model->first(at::ones({1, 4}) * (cells.rank() + 1)).sum().backward();
      };
      step();
      gradient = model->first->weight.grad();
      gradient.zero_();
      step();
      cells.expect(gradient.is_same(model->first->weight.grad()), "the gradient was copied");
      const at::Tensor bias = model->first->bias.grad();
      cells.expect(bias.storage().data_ptr().get() == gradient.storage().data_ptr().get(),
                   "a layer's gradients lie apart");
    }
    const at::Tensor left = model->first->weight.grad();
    cells.expect_same(left, gradient, "the gradient that is left");
    cells.expect(!left.is_alias_of(gradient), "the group's memory is still in use");
  });
}

void check_order(Cells& cells) {
  cells.cell("buckets follow the order in which gradients come", [&] {
    Two model;
    std::vector<std::string> order;
    Options options;
    options.buckets = {.first_bytes = 1, .bytes = 1};  // a bucket for each parameter
    options.comm_hook = [&](GradientBucket& bucket, comm::Communicator& group) {
      order.push_back(bucket.parameters.front());
      return [work = group.all_reduce(bucket.flat)]() mutable { work.wait(); };
    };
    DistributedDataParallel parallel(*model, cells.group(), options);
    // The layers are used against the order of registration, so that `first` is ready first.
    const auto step = [&] {
      model->first(model->second(at::ones({2, 4}) * (cells.rank() + 1))).mean().backward();
    };
    step();
    cells.expect(order[0].starts_with("second."), "the first step took another order");
    order.clear();
    step();
    cells.expect(order.size() == 4 && order[0].starts_with("first.") &&
                     order[1].starts_with("first.") && order[3].starts_with("second."),
                 "the second step did not follow the first's order");
  });
  cells.cell("a rank without samples has no order to teach", [&] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
    std::string order;
    Options options;
    options.buckets = {.first_bytes = 1, .bytes = 1};
    options.comm_hook = [&](GradientBucket& bucket, comm::Communicator& group) {
      order += bucket.parameters.front().front();
      return [work = group.all_reduce(bucket.flat)]() mutable { work.wait(); };
    };
    DistributedDataParallel parallel(*model, cells.group(), options);
    // Gradients come in the order 0 2 1, which is that of registration neither forwards nor
    // backwards.
    const auto loss = [&] {
      at::Tensor hidden = at::ones({2, 4});
      for (const int layer : {1, 2, 0})
        hidden = model->ptr<nn::LinearImpl>(static_cast<std::size_t>(layer))->forward(hidden);
      return hidden.sum();
    };
    const auto step = [&](bool with_samples) {
      for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
      order.clear();
      if (with_samples)
        parallel.backward(loss(), 2);
      else
        parallel.backward({}, 0);
    };
    step(false);
    step(cells.rank() == 2);
    step(true);
    cells.expect(order == "002211", "the third step took the order " + order);
  });
  cells.cell("a hook's sums become means", [&] {
    Two model;
    Options options;
    options.comm_hook = [](GradientBucket& bucket, comm::Communicator& group) {
      return [work = group.all_reduce(bucket.flat)]() mutable { work.wait(); };
    };
    DistributedDataParallel parallel(*model, cells.group(), options);
    (model->first->bias.sum() * (cells.rank() + 1)).backward();
    cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0f), "the mean of 1, 2 and 3");
  });
  cells.cell("a model of two dtypes", [&] {
    Two model;
    model->second->to(at::kDouble);
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor hidden = model->first(at::ones({1, 4})).to(at::kDouble);
    (model->second(hidden).sum() * (cells.rank() + 1)).backward();
    cells.expect_same(model->second->bias.grad(), at::full({4}, 2.0, at::kDouble),
                      "the gradient in float64");
  });
}

// Changes to a model after it was made data parallel, with plain backward passes.
void check_changed_models(Cells& cells) {
  // Gives each bias a gradient of rank + 1, whose mean is 2.
  const auto backward = [&](Two& model) {
    model->zero_grad();
    ((model->first->bias.sum() + model->second->bias.sum()) * (cells.rank() + 1)).backward();
  };
  const auto expect_means = [&](Two& model, at::ScalarType dtype) {
    for (const nn::Linear& layer : {model->first, model->second})
      cells.expect_same(layer->bias.grad(), at::full({4}, 2.0, dtype), "the mean of 1, 2 and 3");
  };
  cells.cell("a model that is converted goes on", [&] {
    for (const bool has_stepped : {false, true}) {
      Two model;
      DistributedDataParallel parallel(*model, cells.group());
      if (has_stepped) backward(model);
      model->to(at::kDouble);
      for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
      for (int step = 0; step < 2; ++step) {
        backward(model);
        expect_means(model, at::kDouble);
      }
      for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
      parallel.backward((model->first->bias * (cells.rank() + 1)).sum(), 1);
      cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0, at::kDouble),
                        "a counted gradient");
      // Only one parameter is changed, and its earlier gradient has the other type.
      backward(model);
      model->first->bias.set_data(model->first->bias.to(at::kFloat));
      model->first->bias.mutable_grad().reset();
      backward(model);
      cells.expect_same(model->first->bias.grad(), at::full({4}, 2.0f), "of two types");
    }
  });
  for (const bool is_counted : {false, true})
    for (const bool and_back : {false, true})
      cells.cell(fmt::format("a model that is converted{} between forward and backward{}",
                             and_back ? " and back" : "", is_counted ? ", counted" : ""),
                 [&] {
                   Two model;
                   DistributedDataParallel parallel(*model, cells.group());
                   const at::Tensor loss = model->second(model->first(at::ones({1, 4}))).sum();
                   model->to(at::kDouble);
                   if (and_back) model->to(at::kFloat);
                   cells.expect_usage_error(
                       [&] { is_counted ? parallel.backward(loss, 1) : loss.backward(); },
                       "was converted between forward and backward");
                   // Forward again, it goes on.
                   for (int step = 0; step < 2; ++step) backward(model);
                   expect_means(model, and_back ? at::kFloat : at::kDouble);
                 });
  cells.cell("a graph from before a conversion that no pass reaches any more", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    const at::Tensor loss = model->second(model->first(at::ones({1, 4}))).sum();
    model->to(at::kDouble);
    for (int step = 0; step < 2; ++step) backward(model);
    expect_means(model, at::kDouble);
    cells.expect_usage_error([&] { loss.backward(); }, "was converted between");
  });
  cells.cell("a model that one rank alone converts between forward and backward", [&] {
    const auto group = cells.group()->split(0, cells.rank(), "converting");
    Two model;
    DistributedDataParallel parallel(*model, group);
    const at::Tensor loss = model->second(model->first(at::ones({1, 4}))).sum();
    if (cells.rank() == 1) model->to(at::kDouble);
    std::string text;
    try {
      loss.backward();
    } catch (const Error& error) {
      text = error.what();
    }
    cells.group()->barrier().wait();  // a rank that leaves before is named for that
    cells.expect(text.find("was converted between forward and backward") != text.npos,
                 "this rank was told " + text);
    cells.expect(cells.rank() == 1 || text.find("mismatch of rank 1") != text.npos, text);
  });
  cells.cell("a model that was of another type for a while goes on", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    backward(model);
    // As for an evaluation in 16 bits: the former memory comes back, but the accumulator does not.
    for (const at::Tensor& parameter : model->parameters()) {
      const at::Tensor before = parameter.data();
      parameter.mutable_grad().reset();
      parameter.set_data(before.to(at::kHalf));
      parameter.set_data(before);
    }
    backward(model);
    expect_means(model, at::kFloat);
  });
  cells.cell("a model that is loaded goes on", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    backward(model);
    torch::manual_seed(5);
    Two other;
    std::stringstream file;
    torch::save(other, file);
    torch::load(model, file);
    backward(model);
    expect_means(model, at::kFloat);
    cells.expect_same(model->first->weight, other->first->weight, "what was loaded");
  });
  for (const bool find_unused : {true, false})
    cells.cell(fmt::format("a model that one rank alone has loaded is noticed in the next pass{}",
                           find_unused ? "" : ", where nobody asks who used what"),
               [&] {
                 Two model;
                 DistributedDataParallel parallel(*model, cells.group(),
                                                  {.find_unused_parameters = find_unused});
                 const auto use_all = [&] {
                   at::Tensor loss = at::zeros({});
                   for (const at::Tensor& parameter : model->parameters())
                     loss = loss + parameter.sum();
                   loss.backward();
                 };
                 use_all();
                 if (cells.rank() == 1) {
                   std::stringstream file;
                   torch::save(Two(), file);
                   torch::load(model, file);
                 }
                 cells.expect_usage_error(
                     use_all,
                     "4 of 4 parameters are not the same on all ranks that should hold the same: "
                     "'first.weight' has other values on rank 1 than on the other 2");
               });
  cells.cell("a frozen part that one rank alone has loaded is noticed in the next pass", [&] {
    Two model;
    for (const at::Tensor& parameter : model->first->parameters()) parameter.requires_grad_(false);
    DistributedDataParallel parallel(*model, cells.group());
    const auto pass = [&] { model->second(model->first(at::ones({1, 4}))).sum().backward(); };
    pass();
    if (cells.rank() == 2) {
      std::stringstream file;
      torch::save(nn::Linear(4, 4), file);
      torch::load(model->first, file);
    }
    cells.expect_usage_error(pass, "'first.weight' has other values on rank 2 than on the other 2");
  });
  cells.cell("parameters whose model is gone are trained by no rank alone", [&] {
    for (const bool gets_other_memory : {false, true}) {
      auto model = std::make_unique<Two>();
      DistributedDataParallel parallel(**model, cells.group());
      const at::Tensor kept = (*model)->first->weight;
      model.reset();
      if (gets_other_memory) kept.set_data(kept.to(at::kDouble));
      cells.expect_usage_error([&] { kept.sum().backward(); }, "and is gone");
      // A pass that reaches none of them goes on.
      at::ones({1}).requires_grad_().sum().backward();
    }
  });
  cells.cell("ranks compare what they hold, as often as they are told", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    parallel.gradients().check_consistency_every(3);
    // One bit of one rank's memory is flipped after the first comparison.
    backward(model);
    if (cells.rank() == 2) *static_cast<std::uint8_t*>(model->second->weight.data_ptr()) ^= 1;
    backward(model);
    backward(model);
    cells.expect_usage_error(
        [&] { backward(model); },
        "1 of 4 parameters are not the same on all ranks that should hold the same: "
        "'second.weight' has other values on rank 2 than on the other 2");
    cells.expect(parallel.gradients().num_exchanges() == 4, "it came in another exchange");
    parallel.gradients().check_consistency_every(0);
    for (int step = 0; step < 4; ++step) backward(model);
    // Only one rank has written to it before the first pass.
    Two written;
    DistributedDataParallel fresh(*written, cells.group());
    const c10::NoGradGuard no_grad;
    if (cells.rank() == 0) written->first->bias.add_(1);
    const c10::AutoGradMode grad(true);
    cells.expect_usage_error([&] { backward(written); },
                             "'first.bias' has other values on rank 0 than on the other 2");
  });
  cells.cell("parameters that are registered later are refused", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    // All else is frozen, so no gradient comes for which another rank waits.
    for (const at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
    nn::Linear head(4, 2);
    model->register_module("head", head);
    const at::Tensor loss = head(model->first(at::ones({1, 4}))).sum();
    cells.expect_usage_error([&] { loss.backward(); }, "'head.weight' was registered after");
    Two other;
    DistributedDataParallel another(*other, cells.group());
    model->unregister_module("head");
    other->replace_module("first", nn::Linear(4, 4));
    cells.expect_usage_error([&] { backward(other); }, "'first.weight' was registered after");
    other->unregister_module("first");
    cells.expect_usage_error([&] { backward(other); }, "has 2 parameters, and others when");
  });
  cells.cell("steps on gradients that were never sent are noticed", [&] {
    Two model;
    DistributedDataParallel parallel(*model, cells.group());
    backward(model);
    const auto local = parallel.no_sync();
    backward(model);
    backward(model);
    cells.expect_usage_error([&] { parallel.gradients().check_exchanged(); },
                             "the gradient of 'first.bias' is this rank's alone");
    // Steps as torch::optim::SGD does, behind autograd's back.
    for (const at::Tensor& bias : {model->first->bias, model->second->bias})
      cells.expect_usage_error([&] { bias.data().sub_(bias.grad(), 0.1); },
                               "under no_sync() have not been summed");
    // No operator writes this.
    model->first->bias.data_ptr<float>()[0] += 1;
    cells.expect_usage_error([&] { backward(model); }, "an optimizer has stepped on this rank's");
  });
  cells.cell("a model whose data parallelism is gone is not trained on each rank by itself", [&] {
    Two model;
    { const DistributedDataParallel parallel(*model, cells.group()); }
    cells.expect_usage_error([&] { backward(model); }, "by a manager that is gone");
    {
      // A parameter that cannot be trained any more is no reason to end the process.
      Two whole_numbers;
      const DistributedDataParallel parallel(*whole_numbers, cells.group());
      for (const at::Tensor& parameter : whole_numbers->parameters())
        parameter.set_requires_grad(false);
      whole_numbers->to(at::kChar);
    }
    model->to(at::kDouble);
    cells.expect_usage_error([&] { backward(model); }, "by a manager that is gone");
    const DistributedDataParallel again(*model, cells.group());
    backward(model);
    expect_means(model, at::kDouble);
    at::Tensor kept;
    {
      Two gone;
      kept = gone->first->bias;
      const auto parallel = std::make_unique<DistributedDataParallel>(*gone, cells.group());
      gone = nullptr;
    }
    cells.expect_usage_error([&] { kept.sum().backward(); }, "over the ranks and is gone");
  });
  cells.cell("many small parameters cost few operators", [&] {
    constexpr int kLayers = 100;
    nn::Sequential model;
    for (int i = 0; i < kLayers; ++i) model->push_back(nn::Linear(4, 4));
    // Counts with gradients that stay, and with new ones in each pass.
    const auto count = [&](bool set_to_none) {
      model->zero_grad(set_to_none);
      const at::Tensor loss = model->forward(at::ones({1, 4})).sum();
      num_operators = 0;
      const auto handle = at::addThreadLocalCallback(
          at::RecordFunctionCallback(&count_operator).scopes({at::RecordScope::FUNCTION}));
      loss.backward();
      at::removeCallback(handle);
      return num_operators;
    };
    count(false);
    const std::array alone = {count(false), count(true)};
    DistributedDataParallel parallel(*model, cells.group());
    count(false);
    const std::array together = {count(false), count(true)};
    for (const std::size_t i : {0, 1}) {
      cells.expect(alone[i] >= 2 * kLayers, fmt::format("{} operators of a pass alone", alone[i]));
      cells.expect(together[i] - alone[i] < kLayers / 4,
                   fmt::format("{} operators, and {} alone", together[i], alone[i]));
    }
  });
}

}  // namespace

void check_behaviour(Cells& cells) {
  check_agreement(cells);
  check_gradients(cells);
  check_memory(cells);
  check_order(cells);
  check_changed_models(cells);
}

void check_refusal(Cells& cells) {
  cells.cell("what got no gradient is named", [&] {
    Two model;
    Options options;
    options.find_unused_parameters = false;
    DistributedDataParallel parallel(*model, cells.group(), options);
    const at::Tensor ones = at::ones({1, 4});
    const auto step = [&] {
      const at::Tensor hidden = model->first(ones);
      (cells.rank() == 0 ? model->second(hidden) : hidden).sum().backward();
    };
    if (cells.rank() == 1)
      return cells.expect_usage_error(step, "no gradient reached 'second.weight', 'second.bias'");
    try {
      step();
      cells.expect(false, "the other rank waited for nothing");
    } catch (const CommError& error) {
      cells.expect(std::string(error.what()).find("'second.weight'") != std::string::npos,
                   fmt::format("the other rank was told '{}'", error.what()));
    }
  });
}

}  // namespace lockstep::replicate

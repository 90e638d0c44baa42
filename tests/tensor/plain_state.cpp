#include <sstream>

#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <lockstep/base/error.h>
#include <lockstep/mesh/tensors.h>

#include "plain_modules.h"

namespace lockstep::tensor {

namespace {

using ranks::Cells;

// Has a buffer, and a name that two modules share.
struct Kept : torch::nn::Module {
  Kept()
      : fc1(register_module("fc1", torch::nn::Linear(8, 24))),
        fc2(register_module("fc2", torch::nn::Linear(24, 8))),
        again(register_module("again", fc2)),
        count(register_buffer("count", at::arange(3))) {}

  at::Tensor forward(const at::Tensor& x) { return again(at::relu(fc1(fc2(at::relu(fc1(x)))))); }

  torch::nn::Linear fc1, fc2, again;
  at::Tensor count;
};

std::shared_ptr<Kept> make_kept(int seed) {
  torch::manual_seed(seed);
  return std::make_shared<Kept>();
}

void check_full_state(Cells& cells) {
  const auto whole = make_kept(3), cut = make_kept(3), other = make_kept(4);
  auto parallelized = parallelize_module(*cut, cells.group(), kColumnThenRow);
  auto of_other = parallelize_module(*other, cells.group(), kColumnThenRow);
  const auto state = parallelized.full_state_dict();
  cells.expect(state.size() == (cells.rank() == 0 ? 5u : 0u),
               fmt::format("{} tensors", state.size()));
  for (const auto& [name, tensor] : state) {
    const at::Tensor* wanted = whole->named_parameters().find(name);
    cells.expect(!is_cut(tensor), name + " is cut");
    cells.expect_same(tensor, wanted != nullptr ? *wanted : whole->count, name);
  }
  other->count.zero_();
  of_other.load_full_state_dict(state);
  expect_same_weights(cells, *other, *whole, 0);
  cells.expect_same(other->count, whole->count, "a buffer");
  const at::Tensor x = at::ones({2, 8});
  nn::expect_within(cells, other->forward(x), whole->forward(x), 1e-5, "after loading");
  for (const auto& one : parallelized.cut_parameters()) {
    const at::Tensor wanted = whole->named_parameters()[one.name];
    cells.expect_same(one.parameter, mesh::part_of(wanted, one.placement),
                      "the part of " + one.name);
  }
  cells.expect(parallelized.cut_parameters().size() == (cells.num_ranks() > 1 ? 3u : 0u),
               "another number of parts");
}

void check_wrong_state(Cells& cells) {
  const auto cut = make_kept(3);
  auto parallelized = parallelize_module(*cut, cells.group(), kColumnThenRow);
  const auto state = parallelized.full_state_dict();
  const auto refused = [&](std::function<void(std::vector<NamedTensor>&)> change,
                           const std::string& part) {
    auto other = state;
    if (cells.rank() == 0) change(other);
    cells.expect_usage_error([&] { parallelized.load_full_state_dict(other); }, part);
  };
  refused([](auto& all) { all.pop_back(); }, "no 'count'");
  refused([](auto& all) { all[0].tensor = at::zeros({24, 9}); }, "[24, 9] in the state");
  refused([](auto& all) { all.push_back({"more", at::zeros({1})}); }, "has 'more'");
}

template <typename Body>
void expect_throws(Cells& cells, const Body& body, const std::string& what) {
  try {
    body();
  } catch (const std::exception&) {
    return;
  }
  cells.expect(false, what + " does not throw");
}

// Code that goes past operators finds no memory, and gets an error that says so.
void check_no_memory(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  const auto cut = make_kept(3);
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  const at::Tensor weight = cut->fc1->weight;
  cells.expect(weight.size(0) == 24 && weight.numel() == 24 * 8, "it shows another size");
  expect_throws(
      cells, [&] { weight.data_ptr<float>(); }, "data_ptr<float>()");
  expect_throws(
      cells, [&] { weight.accessor<float, 2>(); }, "an accessor");
  cells.expect_usage_error([&] { cells.group()->all_reduce(weight.detach()); }, "has no memory");
  const auto saved = [](const auto& value) {
    std::ostringstream stream;
    torch::save(value, stream);
  };
  cells.expect_usage_error([&] { saved(cut); }, "full_state_dict()");
  cells.expect_usage_error([&] { saved(cut->fc1); }, "cut by columns over");
  cells.expect_usage_error([&] { saved(weight); }, "'fc1.weight'");
  cells.expect_usage_error([&] { saved(cut->parameters()); }, "full_state_dict()");
  cut->forward(at::ones({2, 8})).sum().backward();
  cells.expect_usage_error([&] { saved(weight.grad()); }, "full_tensor()");
  torch::optim::AdamW optimizer(cut->parameters());
  optimizer.step();
  cells.expect_usage_error([&] { saved(optimizer); }, "full_tensor()");
  std::ostringstream file;
  torch::save(make_kept(5), file);
  cells.expect_usage_error(
      [&] {
        std::istringstream stream(file.str());
        auto model = cut;
        torch::load(model, stream);
      },
      "load_full_state_dict()");
}

// An optimizer's state is cut like its parameters, and can be gathered and copied into.
void check_optimizer_state(Cells& cells) {
  const auto cut = make_kept(3), whole = make_kept(3);
  parallelize_module(*cut, cells.group(), kColumnThenRow);
  const auto state_of = [](Kept& model) {
    torch::optim::AdamW optimizer(std::vector{model.fc1->weight});
    model.forward(at::ones({2, 8})).sum().backward();
    optimizer.step();
    auto& state = *optimizer.state().begin()->second;
    return static_cast<torch::optim::AdamWParamState&>(state).exp_avg();
  };
  const at::Tensor got = state_of(*cut), wanted = state_of(*whole);
  cells.expect(is_cut(got) == (cells.num_ranks() > 1), "an optimizer's state is not cut");
  nn::expect_within(cells, full_tensor(got), wanted, 1e-5, "an optimizer's state");
  got.copy_(at::arange(24 * 8).view({24, 8}));
  cells.expect_same(full_tensor(got), at::arange(24 * 8).view({24, 8}).to(at::kFloat),
                    "a state copied into");
}

}  // namespace

void check_plain_state(Cells& cells) {
  cells.cell("whole weights, and back", [&] { check_full_state(cells); });
  cells.cell("a state of another model", [&] { check_wrong_state(cells); });
  cells.cell("memory that is not there", [&] { check_no_memory(cells); });
  cells.cell("an optimizer's state", [&] { check_optimizer_state(cells); });
}

}  // namespace lockstep::tensor

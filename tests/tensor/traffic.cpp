#include <functional>
#include <numeric>

#include <ATen/record_function.h>

#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

#include "parallel_mlp.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

// The calls that a rank made in its group, and the bytes that it sent.
struct Traffic {
  std::vector<std::string> calls;  // such as "all_reduce (sum of 12 float32)"
  std::uint64_t bytes = 0;
};

std::uint64_t bytes_sent_by(const comm::Communicator& group) {
  const auto each = group.sent_bytes();
  return each ? std::accumulate(each->begin(), each->end(), std::uint64_t{0}) : 0;
}

template <typename Body>
Traffic traffic_of(comm::Communicator& group, const Body& body) {
  const std::uint64_t before = group.recorder().last_sequence(), bytes = bytes_sent_by(group);
  body();
  Traffic traffic{.bytes = bytes_sent_by(group) - bytes};
  for (const flight::Entry& entry : group.recorder().entries()) {
    if (entry.sequence <= before) continue;
    std::string text = entry.summary;
    if (const auto number = text.find(" #"); number != std::string::npos)
      text.erase(number, text.find(' ', number + 1) - number);
    traffic.calls.push_back(comm::name_subjects(text, [](std::int32_t) { return ""; }));
  }
  return traffic;
}

void expect_same_traffic(Cells& cells, const Traffic& got, const Traffic& wanted,
                         const std::string& what) {
  const auto joined = [](const std::vector<std::string>& calls) {
    std::string all;
    for (const std::string& call : calls) all += "\n    " + call;
    return all;
  };
  cells.expect(got.calls == wanted.calls, fmt::format("{} asked for{}\n  where right is{}", what,
                                                      joined(got.calls), joined(wanted.calls)));
  cells.expect(got.bytes == wanted.bytes,
               fmt::format("{} sent {} bytes where right is {}", what, got.bytes, wanted.bytes));
  cells.expect(wanted.bytes > 0, what + ": this group does not say what it sent");
}

// A new group, whose calls all fit into its recorder.
std::shared_ptr<comm::Communicator> fresh_group(Cells& cells) {
  return cells.group()->split(0, cells.rank(), "counted");
}

// There is one sum in forward and one in backward.
void check_whole_between(Cells& cells) {
  const auto group = fresh_group(cells);
  ParallelMLP mlp(8, 24);
  cut_parallel_layers(mlp, std::make_shared<TensorAxis>(group));
  const at::Tensor x = at::randn({2, 12, 8}).requires_grad_();
  at::Tensor y;
  const auto sum_of_all = [&] { group->all_reduce(at::zeros({2, 12, 8})).wait(); };
  expect_same_traffic(cells, traffic_of(*group, [&] { y = mlp.forward(x); }),
                      traffic_of(*group, sum_of_all), "forward");
  expect_same_traffic(cells, traffic_of(*group, [&] { y.sum().backward(); }),
                      traffic_of(*group, sum_of_all), "backward");
}

// Forward has a gather and a reduce-scatter. Backward has the same, and gathers x again, because it
// is not kept.
void check_sliced_between(Cells& cells) {
  const auto group = fresh_group(cells);
  const int ranks = cells.num_ranks();
  ParallelMLP mlp(8, 24);
  mlp.down_proj->bias.requires_grad_(false);
  cut_parallel_layers(mlp, std::make_shared<TensorAxis>(group, BetweenLayers::by_positions));
  const at::Tensor part = at::zeros({2, 12 / ranks, 8}), all = at::zeros({2, 12, 8});
  const at::Tensor x = at::randn(part.sizes()).requires_grad_();
  at::Tensor y;
  expect_same_traffic(cells, traffic_of(*group, [&] { y = mlp.forward(x); }),
                      traffic_of(*group,
                                 [&] {
                                   group->all_gather(all, part).wait();
                                   group->reduce_scatter(part, all).wait();
                                 }),
                      "forward");
  expect_same_traffic(cells, traffic_of(*group, [&] { y.sum().backward(); }),
                      traffic_of(*group,
                                 [&] {
                                   group->all_gather(all, part).wait();
                                   group->all_gather(all, part).wait();
                                   group->reduce_scatter(part, all).wait();
                                 }),
                      "backward");
}

// The traffic does not grow with the number of products.
void check_several_products(Cells& cells) {
  const auto group = fresh_group(cells);
  const auto axis = std::make_shared<TensorAxis>(group);
  ColumnParallelLinear a(8, 12), b(8, 24), c(8, 12);
  for (auto* layer : {&a, &b, &c}) cut_parallel_layers(**layer, axis);
  const at::Tensor x = at::randn({2, 12, 8}).requires_grad_();
  expect_same_traffic(cells,
                      traffic_of(*group,
                                 [&] {
                                   const auto all = linears(x, {a.get(), b.get(), c.get()});
                                   (all[0].sum() + all[1].sum() + all[2].sum()).backward();
                                 }),
                      traffic_of(*group,
                                 [&] {
                                   group->all_reduce(at::zeros({2, 12, 8})).wait();
                                 }),
                      "forward and backward");
}

// Forward sends three numbers for each row; backward sends the gradient of the input.
void check_loss_traffic(Cells& cells) {
  const auto group = fresh_group(cells);
  const auto axis = std::make_shared<TensorAxis>(group);
  const auto part = mesh::part_of(1000, cells.rank(), cells.num_ranks());
  const at::Tensor x = at::randn({7, 8}).requires_grad_();
  const at::Tensor weight = at::randn({part.size(), 8}).requires_grad_();
  LossSum loss;
  expect_same_traffic(cells,
                      traffic_of(*group,
                                 [&] {
                                   loss = vocab_parallel_cross_entropy(
                                       enter_products(x, *axis), weight,
                                       at::arange(7, at::kLong) * 100,
                                       {.begin = part.begin, .vocabulary = 1000}, axis);
                                 }),
                      traffic_of(*group,
                                 [&] {
                                   group->all_reduce(at::zeros({7}), comm::ReduceOp::max).wait();
                                   group->all_reduce(at::zeros({2, 7})).wait();
                                 }),
                      "the loss");
  expect_same_traffic(cells, traffic_of(*group, [&] { loss.sum.backward(); }),
                      traffic_of(*group,
                                 [&] {
                                   group->all_reduce(at::zeros({7, 8})).wait();
                                 }),
                      "its backward");
}

// Runs backward and calls `on_product` in this thread as each product begins, with its number.
void run_backward_watched(const at::Tensor& loss, const std::function<void(int)>& on_product) {
  static const std::function<void(int)>* watcher;
  static int num_products;
  watcher = &on_product;
  num_products = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string(function.name()) == "aten::mm") (*watcher)(num_products++);
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  loss.backward();
  at::removeCallback(handle);
}

// The sum of the input's gradient is under way while the product for the weight is computed: rank 0
// begins that product before any other rank begins its backward pass. With slices that is
// impossible, because the input is gathered again in between, so the order of calls is compared.
void check_overlap(Cells& cells, BetweenLayers between) {
  const auto group = fresh_group(cells);
  const auto signals = cells.group()->split(0, cells.rank(), "signals");
  for (const auto& one : {group, signals}) one->set_timeout(milliseconds(20'000));
  ColumnParallelLinear layer(8, 12);
  cut_parallel_layers(*layer, std::make_shared<TensorAxis>(group, between));
  const std::int64_t length =
      between == BetweenLayers::whole ? std::int64_t{12} : 12 / cells.num_ranks();
  const at::Tensor x = at::randn({2, length, 8}).requires_grad_();
  const at::Tensor loss = layer->forward(x).sum();
  std::vector<std::uint64_t> calls;
  const bool first = cells.rank() == 0;
  if (!first && between == BetweenLayers::whole) signals->barrier().wait();
  run_backward_watched(loss, [&](int product) {
    calls.push_back(group->recorder().last_sequence());
    if (first && product == 1 && between == BetweenLayers::whole) signals->barrier().wait();
  });
  cells.expect(calls.size() == 2, "another number of products");
  if (calls.size() == 2)
    cells.expect(calls[1] == calls[0] + 1, "the sum did not begin between the two products");
}

}  // namespace

void check_traffic(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  cells.cell("what a column and a row send", [&] { check_whole_between(cells); });
  cells.cell("what they send of slices", [&] { check_sliced_between(cells); });
  cells.cell("what several columns of one input send", [&] { check_several_products(cells); });
  cells.cell("what a loss sends", [&] { check_loss_traffic(cells); });
  cells.cell("a sum beside the weight's product",
             [&] { check_overlap(cells, BetweenLayers::whole); });
  cells.cell("a sum of slices beside the weight's product",
             [&] { check_overlap(cells, BetweenLayers::by_positions); });
}

}  // namespace lockstep::nn

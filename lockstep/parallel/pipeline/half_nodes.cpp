#include <lockstep/parallel/pipeline/half_nodes.h>

#include <limits>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// As those that accumulate gradients: whatever is ready for it goes there at once.
constexpr auto kAtOnce = std::numeric_limits<std::uint64_t>::max();

}  // namespace

WeightPart::WeightPart(const Node& node, edge_list weight_edges)
    : Node(node.sequence_nr(), std::move(weight_edges)), kept_(num_outputs()) {
  for (std::size_t i = 0; i < node.num_inputs(); ++i)
    input_metadata_.emplace_back(node.input_metadata(i));
}

WeightPart::WeightPart(NodePointer node, edge_list weight_edges)
    : WeightPart(*node, std::move(weight_edges)) {
  node_ = std::move(node);
}

WeightPart::WeightPart(const torch::autograd::Edge& edge, at::Tensor gradient)
    : Node(kAtOnce, {edge}), kept_{kept(std::move(gradient))} {
  input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
}

WeightPart::Kept WeightPart::kept(at::Tensor tensor) {
  const auto version = tensor.defined() ? tensor._version() : 0;
  return {std::move(tensor), version};
}

void WeightPart::keep(const variable_list& gradients) {
  kept_.clear();
  for (const at::Tensor& gradient : gradients) kept_.push_back(kept(gradient));
}

void WeightPart::set_gradient(std::size_t edge, at::Tensor gradient) {
  kept_[edge] = kept(std::move(gradient));
}

variable_list WeightPart::apply(variable_list&&) {
  variable_list gradients;
  for (Kept& kept : kept_) {
    if (kept.tensor.defined() && kept.tensor._version() != kept.version)
      throw UsageError(
          "a gradient of shape {} was changed in place between the two halves of its backward "
          "pass, and the second needs it as it was: change a copy of an input's gradient, or "
          "change it once the second half has run",
          c10::str(kept.tensor.sizes()));
    gradients.push_back(std::move(kept.tensor));
  }
  kept_.clear();
  if (node_ == nullptr) return gradients;
  node_->next_edges() = next_edges();
  return (*node_)(std::move(gradients));
}

void WeightPart::release_variables() {
  if (node_ != nullptr) node_->release_variables();
}

WeightStart::WeightStart(const std::vector<WeightPartPointer>& parts, const at::Tensor& token)
    : Node(kAtOnce) {
  for (const auto& part : parts) add_next_edge({part, 0});
  add_input_metadata(token);
}

variable_list WeightStart::apply(variable_list&&) { return variable_list(num_outputs()); }

InputPart::InputPart(NodePointer node, WeightPartPointer rest)
    : Node(node->sequence_nr()), node_(std::move(node)), rest_(std::move(rest)) {
  for (std::size_t i = 0; i < node_->num_inputs(); ++i)
    input_metadata_.emplace_back(node_->input_metadata(i));
  for (std::size_t i = 0; i < node_->num_outputs(); ++i)
    if (rest_->next_edge(i).is_valid()) node_->next_edges()[i] = {};
  set_next_edges(edge_list(node_->next_edges()));
}

variable_list InputPart::apply(variable_list&& gradients) {
  rest_->keep(gradients);
  for (const auto& edge : next_edges())
    if (edge.is_valid()) return (*node_)(std::move(gradients));
  return variable_list(num_outputs());
}

WeightStop::WeightStop(WeightPartPointer rest, std::size_t edge)
    : Node(kAtOnce), rest_(std::move(rest)), edge_(edge) {
  const auto& weight = rest_->next_edge(edge);
  input_metadata_.emplace_back(weight.function->input_metadata(weight.input_nr));
}

variable_list WeightStop::apply(variable_list&& gradients) {
  rest_->set_gradient(edge_, std::move(gradients.front()));
  return {};
}

}  // namespace lockstep::pipeline

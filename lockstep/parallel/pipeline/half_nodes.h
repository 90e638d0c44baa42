// The nodes that stand in autograd's graph where a backward pass is cut in two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace lockstep::pipeline {

// Shared or intrusive, by version of LibTorch.
using NodePointer = decltype(torch::autograd::Edge::function);

// As LibTorch makes its own, which die without recursion however long the graph is.
template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                              [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

// What a node adds to the gradients of parameters, which waits for the second half. It comes at the
// node's turn there, so that gradients are summed in the order of a whole pass.
//
// It runs on the node's own stream, and gives back what the node saved when it has.
//
// Threading: as autograd's nodes; the first half has ended when the second begins.
class WeightPart final : public torch::autograd::Node {
 public:
  // Of what the node computes in the first half, and hands in by set_gradient(); `weight_edges` are
  // the node's own, without those that lead elsewhere.
  WeightPart(const torch::autograd::Node& node, torch::autograd::edge_list weight_edges);
  // Of what the node, which is there until then, has yet to compute from what keep() is given.
  WeightPart(NodePointer node, torch::autograd::edge_list weight_edges);
  // Of a gradient that the caller gave.
  WeightPart(const torch::autograd::Edge& edge, at::Tensor gradient);

  void keep(const torch::autograd::variable_list& gradients);
  void set_gradient(std::size_t edge, at::Tensor gradient);

  void release_variables() override;
  std::string name() const override { return "lockstep::pipeline::WeightPart"; }

 private:
  struct Kept {
    at::Tensor tensor;
    std::int64_t version = 0;
  };

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;

  static Kept kept(at::Tensor tensor);

  NodePointer node_;        // none where it has computed already
  std::vector<Kept> kept_;  // the gradients of the node's results, or those it computed
};

using WeightPartPointer =
    decltype(make_node<WeightPart>(std::declval<NodePointer>(), torch::autograd::edge_list()));

// Where the second half starts: its parts have their gradients already.
class WeightStart final : public torch::autograd::Node {
 public:
  // `token` is what autograd is given as its gradient.
  WeightStart(const std::vector<WeightPartPointer>& parts, const at::Tensor& token);

  std::string name() const override { return "lockstep::pipeline::WeightStart"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
};

// A node in the first half, without the gradients of its weights.
class InputPart final : public torch::autograd::Node {
 public:
  // Takes the node's edges to weights away from it.
  InputPart(NodePointer node, WeightPartPointer rest);

  std::string name() const override { return "lockstep::pipeline::InputPart"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  NodePointer node_;
  WeightPartPointer rest_;
};

// Stands in the first half where a parameter, or a view of one, does in the whole graph.
class WeightStop final : public torch::autograd::Node {
 public:
  WeightStop(WeightPartPointer rest, std::size_t edge);

  std::string name() const override { return "lockstep::pipeline::WeightStop"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  WeightPartPointer rest_;
  std::size_t edge_;
};

}  // namespace lockstep::pipeline

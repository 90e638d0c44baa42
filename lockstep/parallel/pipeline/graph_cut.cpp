#include <lockstep/parallel/pipeline/graph_cut.h>

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/version.h>

#include <lockstep/parallel/pipeline/node_kinds.h>

namespace lockstep::pipeline {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

// A hook sees and may change what the whole node is given or computes.
bool has_hooks(Node& node) {
#if TORCH_VERSION_MAJOR >= 2
  if (!node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty()) return true;
#endif
  return !node.pre_hooks().empty() || !node.post_hooks().empty();
}

class Cut {
 public:
  explicit Cut(const Parameters& parameters) : parameters_(parameters) {}

  bool leads_to_weights(const Edge& edge) { return edge.is_valid() && is_weight(*edge.function); }

  // Everything from here on.
  void go_through(const Edge& root) {
    visit(root);
    while (!to_visit_.empty()) {
      const NodePointer node = std::move(to_visit_.back());
      to_visit_.pop_back();
      for (const Edge& edge : node->next_edges())
        if (!leads_to_weights(edge)) visit(edge);
      cut(node);
    }
  }

  void redirect(Edge& edge) const {
    if (const auto found = instead_.find(edge.function.get()); found != instead_.end())
      edge.function = found->second;
  }

  std::vector<WeightPartPointer> finish() {
    for (const NodePointer& node : visited_)
      for (Edge& edge : node->next_edges()) redirect(edge);
    for (const auto& [node, part] : instead_)
      for (Edge& edge : part->next_edges()) redirect(edge);
    return std::move(parts_);
  }

 private:
  // A parameter, or what passes its gradient on to it.
  bool is_weight(Node& node) {
    if (const auto known = is_weight_.find(&node); known != is_weight_.end()) return known->second;
    bool is = false;
    if (const auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
      is = parameters_.contains(leaf->variable.unsafeGetTensorImpl());
    } else if (only_passes_on(node.name())) {
      const auto& edges = node.next_edges();
      is = std::ranges::any_of(edges, &Edge::is_valid) &&
           std::ranges::all_of(edges, [&](const Edge& edge) {
             return !edge.is_valid() || is_weight(*edge.function);
           });
    }
    return is_weight_[&node] = is;
  }

  void visit(const Edge& edge) {
    if (!edge.is_valid() || !seen_.insert(edge.function.get()).second) return;
    visited_.push_back(edge.function);
    to_visit_.push_back(edge.function);
  }

  void cut(const NodePointer& node) {
    edge_list weights(node->num_outputs());
    for (std::size_t i = 0; i < weights.size(); ++i)
      if (leads_to_weights(node->next_edge(i))) weights[i] = node->next_edge(i);
    if (std::ranges::none_of(weights, &Edge::is_valid)) return;
    if (can_wait(node->name()) && !has_hooks(*node)) {
      parts_.push_back(make_node<WeightPart>(node, std::move(weights)));
      instead_[node.get()] = make_node<InputPart>(node, parts_.back());
      return;
    }
    parts_.push_back(make_node<WeightPart>(std::as_const(*node), std::move(weights)));
    for (std::size_t i = 0; i < node->num_outputs(); ++i)
      if (parts_.back()->next_edge(i).is_valid())
        node->next_edges()[i] = Edge(make_node<WeightStop>(parts_.back(), i), 0);
  }

  const Parameters& parameters_;
  std::unordered_map<const Node*, bool> is_weight_;
  std::unordered_set<const Node*> seen_;
  std::vector<NodePointer> visited_;
  std::vector<NodePointer> to_visit_;
  std::vector<WeightPartPointer> parts_;
  std::unordered_map<const Node*, NodePointer> instead_;  // of those whose weights wait
};

}  // namespace

std::vector<WeightPartPointer> cut(edge_list& roots, std::vector<at::Tensor>& gradients,
                                   const Parameters& parameters) {
  Cut graph(parameters);
  std::vector<WeightPartPointer> given;
  edge_list others;
  std::vector<at::Tensor> gradients_of_others;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (graph.leads_to_weights(roots[i])) {
      given.push_back(make_node<WeightPart>(roots[i], std::move(gradients[i])));
      continue;
    }
    graph.go_through(roots[i]);
    others.push_back(std::move(roots[i]));
    gradients_of_others.push_back(std::move(gradients[i]));
  }
  std::vector<WeightPartPointer> parts = graph.finish();
  for (Edge& root : others) graph.redirect(root);
  parts.insert(parts.begin(), given.begin(), given.end());
  roots = std::move(others);
  gradients = std::move(gradients_of_others);
  return parts;
}

}  // namespace lockstep::pipeline

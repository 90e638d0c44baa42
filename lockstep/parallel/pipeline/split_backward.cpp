#include <lockstep/parallel/pipeline/split_backward.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

using NodePointer = WeightHalf::NodePointer;

// Makes a node as LibTorch does, so that long graphs are destroyed without recursion.
template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                              [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

// Stands in the second half for a node of the whole graph: it adds the node's part to the gradients
// of parameters. It runs at the node's turn, so that gradients are summed in the order of a whole
// pass, and on the node's own stream. Afterwards it frees what the node saved.
//
// Threading: as autograd's nodes; the first half has ended when the second begins.
class WeightPart final : public torch::autograd::Node {
 public:
  // For gradients that the node computes in the first half and passes to set_gradient().
  // `weight_edges` are the node's edges, without those that do not lead to weights.
  WeightPart(const torch::autograd::Node& node, torch::autograd::edge_list weight_edges);
  // For gradients that the node, which this keeps alive, computes later from those given to keep().
  WeightPart(NodePointer node, torch::autograd::edge_list weight_edges);
  // For a gradient that the caller gave.
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

  NodePointer node_;        // null if it has computed its gradients already
  std::vector<Kept> kept_;  // the gradients of the node's results, or those that it computed
};

using WeightPartPointer =
    decltype(make_node<WeightPart>(std::declval<NodePointer>(), torch::autograd::edge_list()));

// The root of the second half. Its parts have their gradients already.
class WeightStart final : public torch::autograd::Node {
 public:
  // `token` is the gradient that autograd gets for it.
  WeightStart(const std::vector<NodePointer>& parts, const at::Tensor& token);

  std::string name() const override { return "lockstep::pipeline::WeightStart"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;
};

// Stands in the first half for a node, and computes no gradients of its weights.
class InputPart final : public torch::autograd::Node {
 public:
  // Removes the node's edges to weights.
  InputPart(NodePointer node, WeightPartPointer rest);

  std::string name() const override { return "lockstep::pipeline::InputPart"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  NodePointer node_;
  WeightPartPointer rest_;
};

// Stands in the first half for a parameter or a view of one.
class WeightStop final : public torch::autograd::Node {
 public:
  WeightStop(WeightPartPointer rest, std::size_t edge);

  std::string name() const override { return "lockstep::pipeline::WeightStop"; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  WeightPartPointer rest_;
  std::size_t edge_;
};

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The sequence number of nodes that accumulate gradients, which autograd runs as soon as they are
// ready.
constexpr auto kAtOnce = std::numeric_limits<std::uint64_t>::max();

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

WeightStart::WeightStart(const std::vector<NodePointer>& parts, const at::Tensor& token)
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

// "SqueezeBackward1" is the node of the second overload.
std::string without_overload(std::string name) {
  name.erase(name.find_last_not_of("0123456789") + 1);
  return name;
}

// Whether a node, by its name(), passes a gradient on in other sizes, places or types, and computes
// nothing with it: views, copies, casts. If it leads only to parameters, it belongs to them.
bool only_passes_on(std::string name) {
  static const std::unordered_set<std::string> names = {
      "AliasBackward",
      "AsStridedBackward",
      "CatBackward",
      "CloneBackward",
      "ExpandBackward",
      "PermuteBackward",
      "SelectBackward",
      "ReshapeAliasBackward",
      "SliceBackward",
      "SplitBackward",
      "SplitWithSizesBackward",
      "SqueezeBackward",
      "StackBackward",
      "TBackward",
      "ToCopyBackward",
      "TransposeBackward",
      "UnbindBackward",
      "UnsafeSplitBackward",
      "UnsafeViewBackward",
      "UnsqueezeBackward",
      "UnsafeSplitWithSizesBackward",
      "ViewBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

// Whether it pays to compute a node's weight gradient later: products, convolutions, look-ups in a
// table. It is computed apart from the other gradients, at no cost, from what the node saved and
// the gradient of its result, which is therefore kept.
//
// LinearBackward is MPS's; elsewhere a linear layer is one of the products. Convolutions of all
// dimensions, transposed ones too, are one node.
bool can_wait(std::string name) {
  // The function declares it itself (nn/tensor_parallel/weights_may_wait.h).
  if (name.find("lockstep::nn::WeightsMayWait<") != std::string::npos) return true;
  static const std::unordered_set<std::string> names = {
      "AddmmBackward",  "BaddbmmBackward",   "BmmBackward",         "MmBackward",
      "LinearBackward", "EmbeddingBackward", "IndexSelectBackward", "ConvolutionBackward",
  };
  return names.contains(without_overload(std::move(name)));
}

using Parameters = std::unordered_set<const c10::TensorImpl*>;

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

// A hook may change the inputs or results of the whole node, so such a node cannot be cut.
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

  // Visits all nodes from here on.
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
  // Whether a node is a parameter, or passes its gradient on to parameters only.
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
  std::unordered_map<const Node*, NodePointer> instead_;  // for nodes whose weights wait
};

// Changes the edges of the nodes that `roots` lead to, and the roots, so that they lead to no
// parameter. Returns the nodes to run later to reach the parameters. `gradients` are those of the
// roots; roots that are parameters themselves, and their gradients, are removed from both lists.
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

using torch::autograd::edge_list;
using torch::autograd::Engine;

void run_graph(const edge_list& roots, const std::vector<at::Tensor>& gradients) {
  if (roots.empty()) return;
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false, /*accumulate_grad=*/true);
}

// The gradient 1 of a loss, as in LibTorch's backward().
at::Tensor one_for(const at::Tensor& output, std::size_t index) {
  if (output.numel() != 1)
    throw UsageError("the output {} of shape {} came without a gradient, and only that of one "
                     "number is 1 by itself: pass the gradient that the next stage sent",
                     index, c10::str(output.sizes()));
  return at::ones_like(output, at::MemoryFormat::Preserve);
}

}  // namespace

void WeightHalf::run() {
  if (parts_.empty()) return;
  // Runs on this thread, as the root has no gradient on a GPU, and on forward's streams.
  const auto token = at::empty({0});
  const edge_list start = {{make_node<WeightStart>(parts_, token), 0}};
  parts_.clear();
  run_graph(start, {token});
}

SplitBackward::SplitBackward(const torch::nn::Module& module)
    : SplitBackward(module.parameters()) {}

SplitBackward::SplitBackward(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  for (const at::Tensor& parameter : parameters_) known_.insert(parameter.unsafeGetTensorImpl());
}

WeightHalf SplitBackward::backward_input(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& gradients) const {
  if (outputs.size() != gradients.size())
    throw UsageError("{} outputs came with {} gradients: pass one for each, undefined for a loss",
                     outputs.size(), gradients.size());
  edge_list roots;
  std::vector<at::Tensor> starts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    starts.push_back(gradients[i].defined() ? gradients[i] : one_for(outputs[i], i));
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
  }
  const std::vector<WeightPartPointer> parts = cut(roots, starts, known_);
  WeightHalf rest({parts.begin(), parts.end()});
  run_graph(roots, starts);
  return rest;
}

}  // namespace lockstep::pipeline

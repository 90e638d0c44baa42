// Autograd without tensors: the memory of a forward and backward pass, from sizes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <lockstep/plan/model_sizes.h>

namespace lockstep::plan {

// A model is described like a forward pass: functions over Values, which variables hold as they
// hold tensors. A result's memory lives for as long as a Value or an operator's backward refers to
// it; backward goes through the operators last to first, as LibTorch's does.
//
// Ownership: Values and Memory refer to the Tape, which outlives them. Threading: one thread.
class Tape {
 public:
  class Bytes;
  using Memory = std::shared_ptr<Bytes>;

  // Stands for a tensor.
  struct Value {
    Memory memory;
    std::int64_t bytes = 0;
    std::size_t node = kNone;  // the operator whose result it is; none for inputs
    std::size_t output = 0;    // which of its results
  };

  // How an operator uses memory.
  struct Operator {
    std::vector<Value> inputs;  // those that gradients flow to
    std::int64_t bytes = 0;     // of its result
    std::vector<Memory> saved = {};
    bool saves_result = false;
    std::int64_t statistics = 0;               // made in forward for backward, and nothing else
    std::vector<std::size_t> parameters = {};  // read in forward, and given gradients
    std::vector<std::size_t> read_again = {};  // in backward
    std::int64_t forward_scratch = 0;          // while forward runs
    std::int64_t backward_scratch = 0;         // while backward runs
    std::vector<std::int64_t> gradients = {};  // of its inputs, where not of their sizes
  };

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // Numbered from 0.
  std::size_t add_parameter(std::int64_t gradient_bytes);

  Value input(std::int64_t bytes);
  Value apply(const Operator& op);
  // A sum of two of one size: nothing is saved, and both get the gradient as it comes.
  Value add(const Value& a, const Value& b);
  // Views of one tensor, whose gradients are put together again.
  std::vector<Value> split(const Value& whole, const std::vector<std::int64_t>& sizes);
  // Keeps the input, and computes what backward needs a second time.
  using Function = std::function<Value(const Value&)>;
  Value recompute(const Function& function, const Value& input);

  // Ends the description: backward from its last result, which goes before the walk begins.
  StepTrace backward(Value loss);

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  struct Edge {
    std::size_t node = kNone;
    std::size_t output = 0;
    std::int64_t bytes = 0;  // of the gradient, as backward computes it
  };
  struct Node {
    std::vector<Edge> inputs;
    std::vector<Memory> gradients;  // of its results
    std::vector<Memory> saved;
    std::vector<std::size_t> parameters;
    std::vector<std::size_t> read_again;
    std::int64_t scratch = 0;
    bool passes_on = false;  // the gradient as it is
    bool saves = false;
    std::size_t region = kNone;
  };
  struct Parameter {
    std::int64_t bytes = 0;
    std::size_t pending = 0;  // operators that have yet to give it a gradient
    Memory gradient;
  };
  // A function that is computed again.
  struct Region {
    Function function;
    Value input;
    Memory generators;
    std::size_t first = 0;  // nodes
    std::size_t end = 0;
    bool filled = false;
  };

  Memory take(std::int64_t bytes);
  void change(std::int64_t bytes);
  void note(StepTrace::Kind kind, std::size_t parameter);
  Value record(Node node, std::int64_t bytes, const Operator& op);
  Value fill(const Operator& op);
  void run(std::size_t index);
  void run_again(Region& region);
  void deliver(const Edge& edge, Memory gradient);
  void deliver_to_parameter(std::size_t parameter);

  std::int64_t live_ = 0;
  std::int64_t kept_ = 0;  // gradients that have come
  std::int64_t peak_ = 0;  // without them, since the last event
  StepTrace trace_;
  std::vector<Parameter> parameters_;
  std::vector<Node> nodes_;
  std::vector<Region> regions_;
  std::size_t first_run_ = kNone;   // the region whose function runs for the first time
  std::size_t second_run_ = kNone;  // or for the second
  std::size_t next_ = 0;            // in the latter, the node whose turn it is
  std::size_t wanted_end_ = 0;      // and behind the last that saves anything
};

}  // namespace lockstep::plan

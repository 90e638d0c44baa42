// Everything that the ranks of a pipeline send each other in a step: activations and gradients
// between stages, the loss, and the gradients of parameters that stages share.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// The shapes and types of the tensors between two stages, and which of them want a gradient.
struct BoundaryShape {
  struct Entry {
    std::vector<std::int64_t> sizes;
    at::ScalarType type = at::kFloat;
    bool wants_gradient = false;

    bool operator==(const Entry&) const = default;
  };
  std::vector<Entry> entries;

  bool operator==(const BoundaryShape&) const = default;
  std::string text() const;  // "Float [4, 16, 32] with a gradient, Long [4, 16]"
};

BoundaryShape shape_of(const std::vector<at::Tensor>& tensors);

// A shape as numbers, for another rank: the number of tensors, then for each its type, whether it
// wants a gradient, its number of dims and their sizes. Reading allocates no more than the numbers
// there are. CommError (corrupted), which names the group, where the numbers are not a shape.
std::vector<std::int64_t> to_numbers(const BoundaryShape& shape);
BoundaryShape shape_from(std::span<const std::int64_t> numbers, const std::string& group);

// Checks how many numbers another rank announces. CommError (corrupted) where no shape has so many.
std::int64_t checked_count(std::int64_t count, const std::string& group);

// A channel from each rank to each rank that it sends to. Each is a group of the two, so that a
// message that waits in one delays no other, and sends and receives never wait for each other.
//
// The first message over a boundary is preceded by its shape (the number of numbers in it, and
// these). All later ones must have the same shape, because the receiver allocates memory and starts
// to receive before the other side sends. Passes with gradients and without (NoGradGuard) have a
// shape each, and so has each kind of micro-batch. Tensors are sent as bytes, so that all types can
// be sent.
//
// Ownership: owns the groups. Threading: one thread at a time. Failure: UsageError where a shape
// changes; CommError from the groups' calls, and where the received numbers are not a shape.
class Channels {
 public:
  // Every rank of the group makes it, with the same schedule.
  Channels(const Schedule& schedule, comm::Communicator& group, c10::Device device);

  // The kind of each micro-batch from now on. An empty list means that all are of one kind.
  void expect_kinds(std::vector<std::int64_t> kinds) { kinds_ = std::move(kinds); }

  // Activations go from `stage` to the stage after it.
  void send_activations(int stage, int micro_batch, const std::vector<at::Tensor>& outputs);
  void start_receiving_activations(int stage, int micro_batch);
  std::vector<at::Tensor> receive_activations(int stage, int micro_batch);

  // Gradients of a stage's inputs go to the stage before it: one for each input that wants one,
  // zeros if it has none. The receiver gets one for each output, undefined if the output wants
  // none.
  void send_gradients(int stage, const std::vector<at::Tensor>& inputs);
  void start_receiving_gradients(int stage, int micro_batch);
  std::vector<at::Tensor> receive_gradients(int stage, int micro_batch);

  // Waits until all messages that were sent have been received.
  void finish_sends();
  // Ends all channels, here and on the other ranks.
  void abort(const std::string& reason);

 private:
  using Pair = std::pair<int, int>;  // from, to
  struct Boundary {
    int after_stage;
    bool with_gradients;
    std::int64_t kind;

    auto operator<=>(const Boundary&) const = default;
  };
  // A receive. Its shape may have to come first, before the tensors can be started.
  struct Receive {
    Action action;
    comm::Work shape_work;
    at::Tensor num_shape_numbers;  // [1], undefined where the shape is known
    at::Tensor shape_numbers;      // undefined until their number is known
    std::vector<at::Tensor> tensors;
    std::vector<comm::Work> works;
    bool started = false;
  };
  struct Channel {
    std::shared_ptr<comm::Communicator> group;
    std::deque<Receive> receives;  // in the order of the channel, not yet taken
  };

  int rank_of(int stage) const;
  Boundary boundary_after(int stage, int micro_batch) const;
  Boundary boundary_of(const Action& receive) const;
  Channel& channel(int from_stage, int to_stage);
  void start(Channel& channel, Receive& receive);
  bool has_shape(Channel& channel, Receive& receive);
  void start_those_possible(Channel& channel);
  Receive take(Channel& channel, const Action& action);
  void send(Channel& channel, const std::vector<at::Tensor>& tensors);
  void send_shape(Channel& channel, const BoundaryShape& shape);

  const Schedule& schedule_;
  int rank_;
  c10::Device device_;
  std::map<Pair, Channel> channels_;
  std::map<Boundary, BoundaryShape> shapes_;  // of boundaries that this rank sends or receives over
  std::vector<std::int64_t> kinds_;           // one for each micro-batch
  std::deque<comm::Work> sends_;              // not yet known to be complete
};

// The loss of a step, which the rank of the last stage computes. That rank sends it to each of the
// others as soon as it is known. A sum over all ranks would make each wait for the slowest; this
// way the loss has arrived when a rank's own work is done, and its next step can begin.
//
// Ownership: shares the group. Threading: one thread at a time. Failure: CommError from the group's
// calls. The destructor waits until the other ranks have received the last loss.
class StepLoss {
 public:
  // `rank` has the last stage. Every rank of the group makes one, and calls begin() and
  // of_all_ranks() in each step; that rank also calls add() for each micro-batch.
  StepLoss(std::shared_ptr<comm::Communicator> group, int rank, int num_micro_batches,
           c10::Device device);
  ~StepLoss();
  StepLoss(const StepLoss&) = delete;
  StepLoss& operator=(const StepLoss&) = delete;

  void begin();
  void add(const at::Tensor& loss);
  double of_all_ranks();
  // To be called after the group was aborted.
  void abort() { telling_ = {}; }

 private:
  void tell();

  std::shared_ptr<comm::Communicator> group_;
  int rank_;
  int num_micro_batches_;
  c10::Device device_;  // of the stages
  at::Tensor sum_;      // of the step so far, in double
  int num_added_ = 0;
  bool is_told_ = false;
  comm::Work telling_;
};

// Sums the gradients of parameters that stages on different ranks share.
//
// Ownership: shares the parameters, and has a group for the ranks of each. Threading: one thread at
// a time. Failure: CommError from the groups' calls.
class TiedGradients {
 public:
  // Every rank of the group makes it, with the same stages.
  TiedGradients(std::vector<TiedParameter> tied, const Schedule& schedule,
                comm::Communicator& group);

  // Before a step: puts aside gradients of earlier steps, which have been summed already.
  void put_aside();
  // After it: sums the gradients of all ranks, and adds them to those that were put aside.
  void sum();
  void abort(const std::string& reason);

 private:
  struct Tied {
    at::Tensor parameter;
    std::shared_ptr<comm::Communicator> group;
    at::Tensor before;
  };
  std::vector<Tied> tied_;  // the parameters that this rank shares with another
};

}  // namespace lockstep::pipeline

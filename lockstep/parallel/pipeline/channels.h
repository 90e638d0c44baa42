// What goes between the ranks of a pipeline.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/boundary_shape.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// A channel from each rank to each that the schedule has it send to: a group of the two, so that
// what waits in one holds up nothing in another, and sends and receives never wait for each other.
//
// What is sent first over a boundary is preceded by its shape (how many numbers tell it, and
// these), and from then on must have it: who receives takes memory and starts to receive before the
// other sends. Passes with gradients and those without (NoGradGuard) have a shape each, and so has
// each kind of micro-batch that there is. Tensors go as bytes, so that all types do.
//
// Ownership: the groups. Threading: one thread at a time. Failure: UsageError where a shape
// changes; CommError from the groups' calls, and where what was received is no shape.
class Channels {
 public:
  // Every rank of the group makes it, with the same schedule.
  Channels(const Schedule& schedule, comm::Communicator& group, c10::Device device);

  // Of which kind each micro-batch is from now on; all of one where there are none.
  void expect_kinds(std::vector<std::int64_t> kinds) { kinds_ = std::move(kinds); }

  // Activations go up from `stage` to the one after it.
  void send_activations(int stage, int micro_batch, const std::vector<at::Tensor>& outputs);
  void start_receiving_activations(int stage, int micro_batch);
  std::vector<at::Tensor> receive_activations(int stage, int micro_batch);

  // Gradients of a stage's inputs go down to the one before it: of those that want one, zeros
  // where there is none. What comes is one for each output, undefined where it wants none.
  void send_gradients(int stage, const std::vector<at::Tensor>& inputs);
  void start_receiving_gradients(int stage, int micro_batch);
  std::vector<at::Tensor> receive_gradients(int stage, int micro_batch);

  // Until all that was sent has been received.
  void finish_sends();
  // Ends all of them, here and at their other ends.
  void abort(const std::string& reason);

 private:
  using Pair = std::pair<int, int>;  // from, to
  struct Boundary {
    int after_stage;
    bool with_gradients;
    std::int64_t kind;

    auto operator<=>(const Boundary&) const = default;
  };
  // A receive, of which something may have yet to be started: the shape comes first.
  struct Receive {
    Action action;
    comm::Work shape_work;
    at::Tensor num_shape_numbers;  // [1], undefined where the shape is known
    at::Tensor shape_numbers;      // undefined until their number has come
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
  std::map<Boundary, BoundaryShape> shapes_;  // of those that this rank sends or receives over
  std::vector<std::int64_t> kinds_;           // of each micro-batch
  std::deque<comm::Work> sends_;              // not yet seen to be over
};

}  // namespace lockstep::pipeline

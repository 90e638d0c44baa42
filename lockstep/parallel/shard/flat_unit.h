// The memory of one unit on one rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/named_tensor.h>
#include <lockstep/parallel/shard/buffer_pool.h>
#include <lockstep/parallel/shard/flat_layout.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

// Whether a unit's parameters are there between steps.
enum class Residence {
  gathered,  // on every rank, always; a rank updates its part of them and gathers the others'
  sharded,   // a rank holds its part; the others' come when an operator needs them, and go
};

// Where the parameters of a model come from that was built without memory for them.
struct Origin {
  // Makes the values of some parameters be there for as long as what it returns lives; empty where
  // they are.
  std::function<std::shared_ptr<void>(std::span<const at::Tensor> parameters)> values = {};
  // Where they are to be; where they are, if not given.
  std::optional<c10::Device> device = {};
};

// Parameters that lie one after the other in one memory. They stay the tensors they were, which the
// module's members and autograd refer to; only where they lie changes. A sharded unit's memory is
// taken and given back in place, so that views and what backward saved lead to it, too.
//
// Ownership: the memory; shares the parameters. Threading: none of its own.
class FlatUnit {
 public:
  // The parameters stay where they are until adopt(). A sharded unit takes its memory from
  // `gathered_memory`; of one that is always there it is null.
  FlatUnit(PlannedUnit plan, std::shared_ptr<comm::Communicator> group,
           std::shared_ptr<BufferPool> gathered_memory, std::optional<c10::Device> device = {});

  const std::string& name() const { return name_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  Residence residence() const {
    return gathered_memory_ == nullptr ? Residence::gathered : Residence::sharded;
  }
  bool is_trained() const { return is_trained_; }
  at::TensorOptions options() const { return flat_.options(); }
  c10::Device device() const { return flat_.device(); }
  std::int64_t gathered_bytes() const;

  // Makes the parameters' values those of the first of these ranks and moves them into this memory;
  // what they lay in before is let go. Only that rank asks the origin for them. Every rank calls
  // it.
  void adopt(comm::Communicator& first_among, const Origin& origin = {});

  // All of the parameters, [num_padded]; only to be used while is_there().
  const at::Tensor& flat() const { return flat_; }
  // This rank's part, [part_size]; of a gathered unit, a view of the whole.
  const at::Tensor& part() const { return part_; }
  // This rank's part of a parameter, flat.
  at::Tensor piece(std::size_t member) const;
  mesh::Placement placement(std::size_t member) const;

  bool is_there() const { return is_there_; }
  void take_memory();
  void give_memory_back(bool scrub);

  // Starts to fill the memory with all ranks' parts.
  comm::Work gather(const comm::CallOptions& options);
  // This rank's part becomes what the gathered memory has there: a caller has written to it.
  void keep_edits();
  // All of it, [num_padded], from elsewhere.
  void replace(const at::Tensor& whole);

 private:
  std::string name_;
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<comm::Communicator> group_;
  std::shared_ptr<BufferPool> gathered_memory_;
  FlatLayout layout_;
  bool is_trained_;
  bool is_there_ = false;
  at::Tensor flat_;
  at::Tensor part_;
};

}  // namespace lockstep::shard

// The memory of one unit on one rank: where its parameters lie, in which types, and how that is cut
// among ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/parallel/shard/buffer_pool.h>
#include <lockstep/parallel/shard/options.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {

// The layout of a unit, in plain numbers: parameters one after the other in row-major order, then
// as much padding as makes all ranks' parts equal and begin where vectors and cache lines do. A
// value; offsets and sizes are in elements.
class FlatLayout {
 public:
  FlatLayout(std::span<const std::int64_t> sizes, int num_ranks);

  std::size_t num_members() const { return ranges_.size(); }
  // A parameter's place in the unit.
  mesh::Interval range(std::size_t member) const { return ranges_[member]; }

  std::int64_t num_elements() const { return ranges_.empty() ? 0 : ranges_.back().end; }
  std::int64_t num_padded() const { return part_ * num_ranks_; }

  // A rank's part of the unit.
  std::int64_t part_size() const { return part_; }
  mesh::Interval part(int rank) const { return {rank * part_, (rank + 1) * part_}; }

  // A rank's part of a parameter, in the parameter's own order; may be empty.
  mesh::Interval piece(std::size_t member, int rank) const;
  // Where in the rank's part that begins.
  std::int64_t piece_offset(std::size_t member, int rank) const;

 private:
  int num_ranks_;
  std::int64_t part_ = 0;
  std::vector<mesh::Interval> ranges_;
};

// The types and places of a unit's numbers.
struct UnitFormat {
  at::ScalarType given;     // of the module's parameters, before it was sharded
  at::ScalarType own;       // of the part that the optimizer steps on, and of its gradient
  at::ScalarType gathered;  // of the parameters, while they are there
  at::ScalarType sent;      // of parameters, from rank to rank
  at::ScalarType reduced;   // of gradients, from rank to rank
  c10::Device device;       // where operators use them
  c10::Device stepped_on;   // where the optimizer's part is, and its gradient
  c10::Device sent_from;    // where what is sent waits to be
  bool quantized = false;   // parameters go from rank to rank as int8

  // As the parameters are.
  static UnitFormat of(at::ScalarType own, c10::Device device);
  // Types other than Float stay what they are.
  static UnitFormat of(at::ScalarType own, c10::Device device, const MixedPrecision& precision,
                       const CPUOffload& offload);

  // Whether the optimizer can step on gathered parameters themselves.
  bool is_one() const { return sent == own && gathered == own && stepped_on == device; }
  // Whether operators compute in another type than the module's.
  bool computes_in_other_type() const { return gathered != given; }
};

// A contiguous tensor over a storage of its own that has no bytes.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);

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
// module's members and autograd refer to; only where they lie changes, and where the format says so
// their type. A sharded unit's memory is taken and given back in place, so that views and what
// backward saved lead to it, too.
//
// A rank's part is there up to three times: as the optimizer steps on it, as it is sent to other
// ranks, and in the gathered memory. Where types and places are the same, so is the memory.
//
// Ownership: the memory; shares the parameters. Threading: none of its own.
class FlatUnit {
 public:
  // The parameters stay where they are until adopt(). A sharded unit takes its memory from
  // `gathered_memory`; of one that is always there it is null.
  // Where `node` is given, its ranks keep a copy among them once they have gathered one.
  FlatUnit(PlannedUnit plan, std::shared_ptr<comm::Communicator> group,
           std::shared_ptr<BufferPool> gathered_memory, const UnitFormat& format,
           std::shared_ptr<comm::Communicator> node = nullptr);

  const std::string& name() const { return name_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  const UnitFormat& format() const { return format_; }
  Residence residence() const {
    return gathered_memory_ == nullptr ? Residence::gathered : Residence::sharded;
  }
  // Whether writes to the parameters have to be noticed: other ranks read another copy.
  bool has_owner() const { return residence() == Residence::sharded || !format_.is_one(); }
  bool is_trained() const { return is_trained_; }
  c10::Device device() const { return format_.device; }
  // The options of a flat tensor of another type, where the parameters are.
  at::TensorOptions options(at::ScalarType type) const;
  std::int64_t gathered_bytes() const;
  // The bytes that a rank holds between steps, on the device and in the host's memory beside it.
  std::int64_t device_bytes_at_rest() const;
  std::int64_t host_bytes_at_rest() const;

  // Makes the parameters' values those of the first of these ranks and moves them into this memory;
  // what they lay in before is let go. Only that rank asks the origin for them. Every rank calls
  // it.
  void adopt(comm::Communicator& first_among, const Origin& origin = {});

  // Parameters of a unit that is always there may have been given other memory, as torch::load()
  // does: their values come into this memory, and they with them. Returns how many they were.
  // UsageError for one of another type, shape or device.
  std::size_t take_back();

  // All of the parameters, [num_padded]; only to be used while is_there().
  const at::Tensor& flat() const { return flat_; }
  // This rank's part as the optimizer steps on it, [part_size].
  const at::Tensor& part() const { return part_; }
  // The same of a parameter, flat.
  at::Tensor piece(std::size_t member) const;
  mesh::Placement placement(std::size_t member) const;

  bool is_there() const { return is_there_; }
  void take_memory();
  void give_memory_back(bool scrub);

  // Starts to fill the memory with all ranks' parts, which are there after finish_gather().
  // abandon_gather() lets go of them once they are here, where nobody has come for them.
  void start_gather(const comm::CallOptions& options);
  void finish_gather();
  void abandon_gather();
  // Whether all of it is here, or has failed.
  bool gather_is_over() const { return gathering_.done() && (!quantized_ || quantized_->done()); }

  // A caller that wrote to part() says so: other ranks are to get it from now on.
  void part_changed();
  // This rank's part becomes what the gathered memory has there: a caller has written to it.
  void keep_edits();

  // All parts as the optimizer steps on them, [num_padded]. Every rank of the group calls it.
  at::Tensor whole();
  // The reverse: all of it from elsewhere.
  void replace(const at::Tensor& whole);

 private:
  bool part_is_sent() const { return sent_.is_same(part_); }
  at::Tensor take(std::int64_t elements, at::ScalarType type) const;
  at::Tensor mine_in_node(const at::Tensor& whole) const;
  at::Tensor as_gathered(const at::Tensor& own) const;
  at::Tensor new_part(at::ScalarType type, c10::Device place) const;
  at::Tensor mine_of(const at::Tensor& whole) const;
  void place_parameter(std::size_t member) const;

  std::string name_;
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<comm::Communicator> group_;
  std::shared_ptr<BufferPool> gathered_memory_;
  FlatLayout layout_;
  UnitFormat format_;
  bool is_trained_;
  bool is_there_ = false;
  at::Tensor flat_;
  at::Tensor part_;
  at::Tensor sent_;  // [part_size]

  // A gather under way.
  comm::Work gathering_;
  std::optional<comm::QuantizedGather> quantized_;
  at::Tensor leaving_;   // what is sent, on the device
  at::Tensor incoming_;  // [num_padded] as sent, where that is not as gathered

  // This rank's part of the gathered memory after the last edit of a caller's, since it came.
  at::Tensor as_edited_;

  // This rank's part of the node's copy, of what was gathered last; undefined where parts have
  // changed since.
  std::shared_ptr<comm::Communicator> node_;
  at::Tensor node_part_;
};

std::int64_t count_parameters(std::span<const std::unique_ptr<FlatUnit>> units);

// A line for each unit: its name, how many parameters and elements, where they are between steps
// and what a rank holds; then all of them together.
std::string describe_units(std::span<const std::unique_ptr<FlatUnit>> units);

// The subjects of calls about units are the units' numbers. In a message they become their names.
std::string with_unit_names(std::string text, std::span<const std::unique_ptr<FlatUnit>> units);
// Runs such calls: what they throw names units.
template <typename Calls>
auto naming_units(std::span<const std::unique_ptr<FlatUnit>> units, const Calls& calls) {
  try {
    return calls();
  } catch (const CommError& error) {
    CommError::Details details = error.details();
    details.explanation = with_unit_names(std::move(details.explanation), units);
    throw CommError(std::move(details));
  }
}

}  // namespace lockstep::shard

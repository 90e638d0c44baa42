// Gathers a unit when an operator is about to use it, the next one meanwhile, and lets others go.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include <c10/util/SmallVector.h>

#include <lockstep/base/deadline.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep::shard {

// The order in which a step uses its units, learned from the step before. It depends on nothing but
// the calls made to it, so that ranks that run the same program predict the same.
class UseOrder {
 public:
  // A unit is used, and it was not the last one that was. Returns the one that came after it the
  // last time; none where that is not known.
  std::optional<std::size_t> note(std::size_t unit);

  // The next step begins. Returns the unit that the last one began with.
  std::optional<std::size_t> start_over();

 private:
  std::vector<std::size_t> last_;
  std::vector<std::size_t> now_;
  std::size_t next_ = 0;  // in last_: what is expected
};

// Owns the memory of sharded units in the eyes of LibTorch's operators. All ranks must use the same
// units in the same order; a gather names its unit, so that ranks that differ are told so. In the
// first step units are gathered when they are needed; from then on the next one of the last step's
// order is on its way while this one computes, in forward and backward.
//
// Ownership: not the units. Threading: any thread may compute, but where several use units at once,
// their order is up to chance, and with it whether ranks agree.
// Failure: CommError out of the operator that needed a unit.
class ParameterGatherer final : public intercept::Owner {
 public:
  struct Limits {
    // Units that are there at once, what comes next included. What one operator needs is always
    // there.
    std::size_t max_live_units = 2;
    bool scrub_freed_memory = false;
  };
  // A gatherer of these units. Those that are always there stay so; it hears of edits to them where
  // the units say that somebody has to.
  ParameterGatherer(std::span<const std::unique_ptr<FlatUnit>> units, Limits limits);

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  bool only_listens() const override { return true; }
  // Refused unless somebody holds the unit, also where it happens to be there: whether a program
  // can save must not depend on what it used last.
  void on_save(const at::Tensor& tensor) const override;

  // Keeps units there for as long as it lives: while an operator runs, or for code that reads and
  // writes parameters behind LibTorch's back. Every rank makes the same. Outlived by the gatherer.
  class [[nodiscard]] Hold {
   public:
    using Units = c10::SmallVector<std::size_t, 4>;

    Hold(ParameterGatherer& gatherer, Units units);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Keeps values that were written through pointers. Otherwise they are lost when the unit goes.
    void keep_edits();

   private:
    ParameterGatherer& gatherer_;
    Units units_;
  };

  // A unit's gradients are complete: backward has no more use for it.
  void done_with(std::size_t unit);
  // Lets all of them go: at the end of a backward pass, or because weights have changed.
  void release_all();
  // The next step begins: its first unit is on its way before anyone asks.
  void start_step();

  // Waits for what is on its way, until the deadline: where a group ends with a call under way, it
  // ends as it does for a fault.
  void await_arrivals(Deadline deadline) const;

  // Whether somebody holds a unit.
  bool is_held() const;

  std::int64_t num_gathers() const { return num_gathers_; }
  std::size_t peak_live_units() const { return peak_live_; }

 private:
  struct State {
    std::size_t pins = 0;
    bool arriving = false;  // nobody has waited for its gather yet
  };

  std::size_t unit_of(const at::Tensor& tensor) const;
  void make_ready(std::size_t unit);
  void start_gather(std::size_t unit, comm::Launch launch);
  void make_room();
  void trim();
  void prefetch(std::size_t unit);
  void release(std::size_t unit);

  std::span<const std::unique_ptr<FlatUnit>> units_;
  Limits limits_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> by_memory_;
  mutable std::mutex mutex_;
  std::vector<State> states_;
  std::vector<std::size_t> live_;  // least recently used first
  std::size_t last_used_;
  UseOrder order_;
  std::int64_t num_gathers_ = 0;
  std::size_t peak_live_ = 0;
};

}  // namespace lockstep::shard

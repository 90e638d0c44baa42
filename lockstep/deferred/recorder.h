// Stands between a constructor and LibTorch: makes its tensors without memory, and puts off what is
// done to them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

#include <lockstep/deferred/contents.h>
#include <lockstep/deferred/factory_scope.h>
#include <lockstep/deferred/random_draws.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

// The owner of its Construction's deferred tensors.
//
// An operator on one of them is put off where it only writes to deferred tensors, or, within the
// scope of the constructor, where it only computes new tensors from them, which are then deferred
// as well. Any other gets the values it asks for: what it reads is there while it runs, and what it
// writes to is an ordinary tensor from there on. That includes operators that autograd is to record
// and those that it is to refuse, so that errors come where they would have come.
//
// Threading: any. One mutex guards the contents; the program's operators run without it, those that
// were put off with it.
class Recorder final : public intercept::Owner,
                       public Factory,
                       public std::enable_shared_from_this<Recorder> {
 public:
  explicit Recorder(std::size_t smallest_bytes);

  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) override;
  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;

  // Calls use(contents), which nobody else uses meanwhile.
  template <typename Use>
  decltype(auto) with_contents(Use&& use) {
    const std::lock_guard lock(mutex_);
    return std::forward<Use>(use)(contents_);
  }

 private:
  // What is left to do for an operator.
  enum class Run {
    no,          // it was put off
    now,         // it needs values
    now_as_well  // it was put off, and writes to memory that holds its content
  };
  // These are called with the mutex locked.
  at::Tensor make_deferred(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  Run put_off(intercept::Call& call, LivingMemories& used);
  Run put_off_writes(intercept::Call& call, Record record, LivingMemories& used);
  Run put_off_computation(intercept::Call& call, Record record);

  const std::size_t smallest_bytes_;
  mutable std::mutex mutex_;
  Contents contents_{*this};
  RandomDraws draws_;
  bool addresses_ran_out_ = false;
};

// The content of some memories, for as long as this is there.
class Hold {
 public:
  // They are held already.
  Hold(std::shared_ptr<Recorder> recorder, LivingMemories memories);
  ~Hold();
  Hold(Hold&&) noexcept = default;
  Hold& operator=(Hold&&) = delete;

 private:
  std::shared_ptr<Recorder> recorder_;
  LivingMemories memories_;
};

}  // namespace lockstep::deferred

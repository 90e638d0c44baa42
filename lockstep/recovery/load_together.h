// Ranks load a job's state together, each its own parts: all fail where one does, and a state that
// does not fit touches nothing.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/recovery/checkpointer.h>

namespace lockstep {

// Runs what a rank does by itself. Where that throws on one, all throw the first of them: a
// checkpoint::DamagedCheckpoint, or for anything else a UsageError.
void do_together(const RankMessages& ranks, const std::function<void()>& work);
// The same of work that has something to say: what every rank says, on every rank.
std::vector<std::string> say_together(const RankMessages& ranks,
                                      const std::function<std::string()>& work);

// UsageError on every rank, which begins with `what` ("the checkpoint 'x'"), where some rank's
// tensors do not fit what is stored, or more is stored than the options allow.
void check_fit_together(const RankMessages& ranks, const std::string& what,
                        const checkpoint::StoredTensors& stored,
                        const std::vector<mesh::HeldTensor>& tensors, const LoadOptions& options);

// How work went that a rank did by itself, and what it tells the others.
struct Outcome {
  enum class Kind : char {
    done = 'd',
    failed = 'f',
    found_damage = 'x',  // in a checkpoint
  };
  Kind kind = Kind::done;
  std::string text = {};  // what there is to say, or why it failed
};

// The outcome of work, whose exceptions end here: the ranks are to go on together, whatever happens
// to this one.
Outcome outcome_of(const std::function<std::string()>& work);

// Every rank's, on every rank, in their order.
std::vector<Outcome> tell_all(const RankMessages& ranks, const Outcome& mine);

}  // namespace lockstep

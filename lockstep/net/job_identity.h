// What tells one job from another.
#pragma once

#include <string>

namespace lockstep::net {

// The same text in all processes of this job, in all of its generations, and in no other job's:
// made from its name (`--rdzv-id`) and its secret, which it does not tell. Empty where the launcher
// gives neither. Two jobs that run at the same time with the same name and the same secret file
// cannot be told apart.
std::string job_identity();

}  // namespace lockstep::net

// Runs what was put off.
#pragma once

#include <span>

#include <lockstep/deferred/account.h>
#include <lockstep/deferred/log.h>

namespace lockstep::deferred {

// Fills memories, which hold nothing yet and whose storages live, with what the operators in the
// log come to. What has to be computed on the way lies elsewhere and goes as soon as nothing needs
// it; neither generators nor memories other than these change.
//
// Failure: what an operator throws. The memories are left with content that means nothing.
void replay(const Log& log, std::span<const Memory* const> memories, Account& account);

}  // namespace lockstep::deferred

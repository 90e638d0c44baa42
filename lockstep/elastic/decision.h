// What becomes of a generation of ranks that cannot go on as it is: node 0's word, for all hosts.
#pragma once

#include <optional>
#include <string>

#include <lockstep/elastic/failure.h>

namespace lockstep::elastic {

struct Decision {
  enum class Action {
    end,      // the whole job
    restart,  // the ranks end, and the job is formed anew
    grow,     // the same, because nodes have come
  };

  Action action = Action::end;
  std::optional<Failure> failure;  // the first one; of all but grow
  std::string reason;              // of grow: a sentence

  // For other launchers. decode throws UsageError where the text is no decision.
  std::string encode() const;
  static Decision decode(const std::string& text);
};

}  // namespace lockstep::elastic

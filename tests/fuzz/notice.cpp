// Notices as a peer sends them.
#include <algorithm>

#include <lockstep/comm/transport/link.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const comm::Notice notice = comm::Notice::decode(input);
  const auto bytes = notice.encode();
  require(bytes.size() <= comm::Notice::kMostBytes, "no notice is longer than it may be");
  const bool understood = std::ranges::equal(bytes, input);
  const comm::Notice malformed = comm::Notice::decode({});
  require(understood || bytes == malformed.encode(),
          "a notice has one encoding; anything else is a plain 'aborted'");
  require(notice.fault <= Fault::engine, "the fault is one of ours");
  require(comm::Notice::decode(bytes).encode() == bytes, "a notice can be passed on");
  const CommError error = notice.error("world", 0);
  require(error.ranks() == notice.ranks && error.fault() == notice.fault,
          "what is thrown is what was said");
}

}  // namespace lockstep::fuzz

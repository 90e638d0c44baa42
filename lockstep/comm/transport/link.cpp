#include <lockstep/comm/transport/link.h>

namespace lockstep::comm {

void Link::check_message(const Fingerprint& mine, std::size_t my_bytes, const Fingerprint& theirs,
                         std::size_t their_bytes) const {
  if (mine == theirs && my_bytes == their_bytes) [[likely]]
    return;
  std::string text;
  if (mine == theirs) {
    text = fmt::format("In {} rank {} sends {} bytes where rank {} expects {}.", mine.text(), peer_,
                       their_bytes, self_, my_bytes);
  } else if (mine.generation != theirs.generation) {
    text = fmt::format("Rank {} is in generation {} of the group, rank {} in {}.", peer_,
                       theirs.generation, self_, mine.generation);
  } else {
    text = fmt::format("Rank {} called {}, but rank {} called {}.", self_, mine.text(), peer_,
                       theirs.text());
  }
  throw CommError(
      {.fault = Fault::mismatch,
       .operation = name(mine.operation),
       .group = {},
       .sequence = mine.sequence,
       .ranks = self_ < peer_ ? std::vector<int>{self_, peer_} : std::vector<int>{peer_, self_},
       .explanation = text});
}

}  // namespace lockstep::comm

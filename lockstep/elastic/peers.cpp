#include <lockstep/elastic/peers.h>

#include <utility>

namespace lockstep::elastic {

std::optional<Layout> Peers::next_layout() { return std::exchange(next_, std::nullopt); }

void Peers::begin(const Layout& layout) {
  failure_.reset();
  decision_.reset();
  paused_ = false;
  all_done_ = false;
  next_ = layout;
}

}  // namespace lockstep::elastic

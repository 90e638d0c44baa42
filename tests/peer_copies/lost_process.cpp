#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>

#include "held_parts.h"
#include "tables.h"

namespace lockstep::peer_copies {

namespace {

using ranks::Cells;

constexpr int kLost = 2;
constexpr std::int64_t kLarge = 8 << 20;  // 32 MiB

// Memory that cannot be read: a process that tries ends.
at::Tensor deadly(std::int64_t elements) {
  struct sigaction end = {};
  end.sa_handler = [](int) { std::_Exit(0); };
  ::sigaction(SIGBUS, &end, nullptr);
  const int fd = ::memfd_create("nothing behind it", MFD_CLOEXEC);
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(elements) * sizeof(float),
                              PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  return at::from_blob(memory, {elements}, at::kFloat);
}

// The remaining ranks go on in a group without the lost one, from one of the copies.
void go_on(Cells& cells, PeerCopies& copies, const std::shared_ptr<comm::Communicator>& left,
           const std::vector<std::int64_t>& steps, std::int64_t large_elements) {
  const RankMessages world(left);
  const auto tensors = parts_of(left->rank(), left->size(), 0, Values::none, large_elements);
  const auto state = copies.restore(world, tensors);
  if (!state) return cells.expect(false, "nothing was restored");
  cells.expect(std::ranges::find(steps, state->step) != steps.end(),
               fmt::format("restored step {}", state->step));
  expect_values(cells, tensors, state->step);
  copies.take(world, contents_of(left->rank(), left->size(), 10, large_elements));
  copies.take(world, contents_of(left->rank(), left->size(), 11, large_elements));
  cells.expect(copies.newest_step(world) == 11, "no copies are taken any more");
}

void expect_lost(Cells& cells, const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError&) {
    return;
  }
  cells.expect(false, "nobody noticed");
}

}  // namespace

void lose_while_copying(Cells& cells) {
  cells.cell("lost while it copies", [&] {
    const auto left = world_of(cells, {0, 1, 3});
    const RankMessages world(cells.group());
    PeerCopies copies;
    for (const int step : {1, 2}) copies.take(world, contents_of(cells.rank(), 4, step));
    auto next = contents_of(cells.rank(), 4, 3);
    if (cells.rank() == kLost) {
      mesh::HeldTensor& last = next.tensors.back();
      last.values = deadly(1 << 20);
      last.shape = {1 << 20};
      last.placement = mesh::Placement::full({1 << 20});
    }
    expect_lost(cells, [&] {
      copies.take(world, next);
      copies.finish();
    });
    go_on(cells, copies, left, {2}, 0);
  });
}

void lose_while_sending(Cells& cells, int delay_ms) {
  cells.cell("lost while it sends", [&] {
    const auto left = world_of(cells, {0, 1, 3});
    const RankMessages world(cells.group());
    PeerCopies copies;
    copies.take(world, contents_of(cells.rank(), 4, 1, kLarge));
    const auto next = contents_of(cells.rank(), 4, 2, kLarge);
    copies.finish();
    copies.take(world, next);
    if (cells.rank() == kLost) {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      std::_Exit(0);
    }
    // Messages that were under way may have arrived.
    expect_lost(cells, [&] { copies.take(world, next); });
    go_on(cells, copies, left, {1, 2}, kLarge);
  });
}

}  // namespace lockstep::peer_copies

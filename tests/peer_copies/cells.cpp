#include <algorithm>
#include <map>
#include <memory>

#include <ATen/ATen.h>

#include <lockstep/recovery/snapshot.h>

#include "held_parts.h"
#include "tables.h"

namespace lockstep::peer_copies {

namespace {

using ranks::Cells;
using Copies = std::unique_ptr<PeerCopies>;

Copies fresh(const std::string& lost_together = "") {
  return std::make_unique<PeerCopies>(PeerCopiesOptions{.lost_together = lost_together});
}

RankMessages messages(const std::shared_ptr<comm::Communicator>& group) {
  return RankMessages(group);
}

// Takes copies of these steps among all ranks; then some ranks lose theirs.
Copies taken(const Cells& cells, const std::vector<std::int64_t>& steps,
             const std::vector<int>& lost, const std::string& lost_together = "") {
  Copies copies = fresh(lost_together);
  for (const std::int64_t step : steps)
    copies->take(messages(cells.group()), contents_of(cells.rank(), cells.num_ranks(), step));
  copies->finish();
  if (std::ranges::find(lost, cells.rank()) != lost.end()) copies = fresh(lost_together);
  return copies;
}

void expect_restored(Cells& cells, PeerCopies& copies, const RankMessages& world,
                     std::int64_t step) {
  const auto newest = copies.newest_step(world);
  cells.expect(newest == step, fmt::format("the newest is of step {}", newest.value_or(-1)));
  const auto tensors = parts_of(world.rank(), world.size(), step, Values::none);
  const auto state = copies.restore(world, tensors);
  if (!state) return cells.expect(false, "nothing was restored");
  expect_values(cells, tensors, step);
  cells.expect(*state == contents_of(0, 1, step).state, "the state beside the tensors is another");
}

void expect_nothing(Cells& cells, PeerCopies& copies, const RankMessages& world) {
  cells.expect(!copies.newest_step(world), "there is a copy");
  const auto tensors = parts_of(world.rank(), world.size(), 0, Values::none);
  cells.expect(!copies.restore(world, tensors), "something was restored");
  expect_untouched(cells, tensors);
}

void check_losses(Cells& cells) {
  const std::vector<int> all = {0, 1, 2, 3};
  cells.cell("nobody lost, newest of two", [&] {
    const auto copies = taken(cells, {3, 4}, {});
    expect_restored(cells, *copies, messages(world_of(cells, all)), 4);
  });
  for (const int lost : all)
    cells.cell(fmt::format("rank {} lost", lost), [&] {
      const auto copies = taken(cells, {1, 2, 3}, {lost});
      expect_restored(cells, *copies, messages(world_of(cells, all)), 3);
    });
  cells.cell("two lost that are no neighbours", [&] {
    const auto copies = taken(cells, {5}, {1, 3});
    expect_restored(cells, *copies, messages(world_of(cells, all)), 5);
  });
  cells.cell("two neighbours lost", [&] {
    const auto copies = taken(cells, {5, 6}, {1, 2});
    const auto world = messages(world_of(cells, all));
    expect_nothing(cells, *copies, world);
    // The run goes on from there.
    copies->take(world, contents_of(cells.rank(), 4, 2));
    copies->finish();
    expect_restored(cells, *copies, messages(world_of(cells, all)), 2);
  });
  cells.cell("a whole host lost", [&] {
    const std::string host = cells.rank() % 2 == 0 ? "even" : "odd";
    for (const auto& lost : {std::vector{0, 2}, std::vector{1, 3}}) {
      const auto copies = taken(cells, {7}, lost, host);
      expect_restored(cells, *copies, messages(world_of(cells, all)), 7);
    }
  });
  cells.cell("one lost, and then another", [&] {
    auto copies = taken(cells, {3, 4}, {2});
    auto world = messages(world_of(cells, all));
    expect_restored(cells, *copies, world, 4);
    copies->take(world, contents_of(cells.rank(), 4, 4));
    copies->finish();
    // Rank 1 had the only copy of the state that rank 2 had kept.
    if (cells.rank() == 1) copies = fresh();
    expect_restored(cells, *copies, messages(world_of(cells, all)), 4);
  });
  cells.cell("one lost, and then another, without a copy between", [&] {
    auto copies = taken(cells, {3, 4}, {2});
    expect_restored(cells, *copies, messages(world_of(cells, all)), 4);
    if (cells.rank() == 1) copies = fresh();
    expect_nothing(cells, *copies, messages(world_of(cells, all)));
  });
}

void check_worlds(Cells& cells) {
  const auto into = [&](const std::vector<int>& members, const std::vector<int>& lost) {
    const auto copies = taken(cells, {8, 9}, lost);
    if (const auto group = world_of(cells, members))
      expect_restored(cells, *copies, messages(group), 9);
  };
  cells.cell("three go on without the fourth", [&] { into({0, 1, 3}, {2}); });
  cells.cell("two of four, in another order", [&] { into({3, 1}, {0, 2}); });
  cells.cell("ranks that changed places", [&] { into({2, 0, 3, 1}, {0}); });
  cells.cell("from two to four", [&] {
    Copies copies = fresh();
    if (const auto pair = world_of(cells, {1, 3})) {
      copies->take(messages(pair), contents_of(pair->rank(), 2, 6));
      copies->finish();
    }
    const auto world = messages(world_of(cells, {0, 1, 2, 3}));
    // Two ranks have no tensor of their own there.
    auto tensors = parts_of(world.rank(), 4, 6, Values::none);
    std::erase_if(tensors, [&](const auto& one) { return one.name.starts_with("own/"); });
    const auto state = copies->restore(world, tensors);
    cells.expect(state && state->step == 6, "nothing was restored");
    expect_values(cells, tensors, 6);
  });
}

void check_what_fits(Cells& cells) {
  cells.cell("what does not fit touches nothing", [&] {
    const auto copies = taken(cells, {3}, {0});
    const auto world = messages(world_of(cells, {0, 1, 2, 3}));
    auto tensors = parts_of(cells.rank(), 4, 3, Values::none);
    if (cells.rank() == 1) tensors[3].shape = {3, 101};
    cells.expect_usage_error([&] { copies->restore(world, tensors); },
                             "'optimizer/flat' is F64 [101, 3] in the checkpoint and F64 [3, 101]");
    expect_untouched(cells, tensors);
    tensors = parts_of(cells.rank(), 4, 3, Values::none);
    const std::vector<mesh::HeldTensor> few(tensors.begin() + 1, tensors.end());
    cells.expect_usage_error([&] { copies->restore(world, few, {.complete = {"model/"}}); },
                             "it has 'model/all', which this model has not");
    expect_untouched(cells, tensors);
    expect_restored(cells, *copies, world, 3);
  });
  cells.cell("some are filled only where they are there", [&] {
    const auto copies = taken(cells, {3}, {});
    const auto world = messages(world_of(cells, {0, 1, 2, 3}));
    std::vector<mesh::HeldTensor> tensors = parts_of(cells.rank(), 4, 3, Values::none);
    const at::Tensor missing = at::zeros({4});
    LoadOptions options{.where_there = {tensors.back(), mesh::whole_tensor("none", missing)}};
    tensors.pop_back();
    copies->restore(world, tensors, options);
    expect_values(cells, {options.where_there.front()}, 3);
    expect_untouched(cells, {options.where_there.back()});
  });
  cells.cell("what one rank cannot copy is told on all", [&] {
    const auto copies = taken(cells, {3}, {});
    auto bad = contents_of(cells.rank(), 4, 4);
    if (cells.rank() == 2)
      bad.tensors.push_back(
          {"sparse", at::eye(3).to_sparse(), {3, 3}, mesh::Placement::full({3, 3})});
    cells.expect_usage_error([&] { copies->take(messages(cells.group()), bad); },
                             "'sparse' cannot be saved: it is sparse");
    expect_restored(cells, *copies, messages(world_of(cells, {0, 1, 2, 3})), 3);
  });
  cells.cell("tensors that change between copies", [&] {
    Copies copies = fresh();
    const auto world = messages(cells.group());
    copies->take(world, contents_of(cells.rank(), 4, 1));
    auto more = contents_of(cells.rank(), 4, 2, cells.rank() == 1 ? 999 : 0);
    if (cells.rank() == 1) more.tensors.back() = mesh::whole_tensor("model/one", at::arange(999));
    copies->take(world, more);
    copies->finish();
    if (cells.rank() == 1) copies = fresh();
    const at::Tensor got = at::zeros({999}, at::kLong);
    copies->restore(messages(world_of(cells, {0, 1, 2, 3})),
                    {mesh::whole_tensor("model/one", got)});
    cells.expect_same(got, at::arange(999), "a tensor that came later");
  });
  cells.cell("what is forgotten is not restored", [&] {
    const auto copies = taken(cells, {3}, {});
    copies->forget();
    expect_nothing(cells, *copies, messages(world_of(cells, {0, 1, 2, 3})));
  });
  cells.cell("new ranks that did not ask for it go on without what was held", [&] {
    const auto copies = taken(cells, {30}, {});
    const auto world = messages(world_of(cells, {0, 1, 2, 3}));
    copies->take(world, contents_of(cells.rank(), 4, 4));
    copies->finish();
    expect_restored(cells, *copies, messages(world_of(cells, {0, 1, 2, 3})), 4);
  });
}

void check_bytes(Cells& cells) {
  cells.cell("every element is sent once, and two copies are kept", [&] {
    constexpr std::int64_t kLarge = 400'000;
    const Copies copies = fresh();
    const auto world = messages(cells.group());
    const auto contents = contents_of(cells.rank(), 4, 1, kLarge);
    std::int64_t all = 0;
    for (const mesh::HeldTensor& one : contents.tensors)
      all += mesh::Placement::full(one.shape).elements() *
             static_cast<std::int64_t>(one.values.element_size());
    all += 3 * 17;  // the other ranks' own tensors
    for (int time = 1; time <= 5; ++time) copies->take(world, contents);
    copies->finish();
    const auto sent =
        static_cast<std::int64_t>(world.sum(static_cast<double>(copies->bytes_sent())));
    const auto held =
        static_cast<std::int64_t>(world.sum(static_cast<double>(copies->bytes_held())));
    // Pieces begin at multiples of 64 bytes.
    constexpr std::int64_t kPadding = 4 * 10 * 64;
    cells.expect(sent >= 5 * all && sent <= 5 * (all + kPadding),
                 fmt::format("{} bytes were sent of 5 times {}", sent, all));
    cells.expect(held >= 4 * all && held <= 4 * (all + kPadding),
                 fmt::format("{} bytes are held of {}", held, all));
  });
  cells.cell("training may go on while a copy is sent", [&] {
    const Copies copies = fresh();
    const auto contents = contents_of(cells.rank(), 4, 1, 4'000'000);
    copies->take(messages(cells.group()), contents);
    for (const mesh::HeldTensor& one : contents.tensors) one.values.zero_();
    cells.group()->all_reduce(at::ones({1000})).wait();
    const auto tensors = parts_of(cells.rank(), 4, 1, Values::none, 4'000'000);
    copies->restore(messages(world_of(cells, {0, 1, 2, 3})), tensors);
    expect_values(cells, tensors, 1);
  });
}

// There are many messages; ranks have different numbers of them for each other, and some have none.
void check_fetching(Cells& cells) {
  cells.cell("bytes that come in many rounds", [&] {
    const auto world = messages(cells.group());
    const int rank = cells.rank();
    const auto byte_at = [](int holder, std::int64_t block, std::int64_t at) {
      return static_cast<std::byte>((at * 7 + at / 256 + block * 3 + holder) % 251);
    };
    // Rank r has blocks r and r + 10.
    std::map<std::int64_t, std::vector<std::byte>> blocks;
    for (const std::int64_t block : {rank, rank + 10})
      for (std::int64_t at = 0; at < 300'000; ++at)
        blocks[block].push_back(byte_at(rank, block, at));
    std::vector<std::vector<BlockStretch>> wanted(4);
    for (int from = 0; from < 4; ++from) {
      if (from == rank || (rank + from) % 4 == 1) continue;
      for (int i = 0; i <= 3 * rank; ++i)
        wanted[static_cast<std::size_t>(from)].push_back(
            {from + (i % 2) * 10, i * 1000 + rank, i == 1 ? 0 : 40'000 + i * 9999});
    }
    std::map<std::pair<int, std::size_t>, std::int64_t> come;
    bool right = true;
    fetch_stretches(
        world, wanted,
        [&](std::int64_t block) -> std::span<const std::byte> { return blocks.at(block); },
        [&](int from, std::size_t index, std::int64_t before, std::span<const std::byte> bytes) {
          const BlockStretch& stretch = wanted[static_cast<std::size_t>(from)][index];
          std::int64_t& so_far = come[{from, index}];
          right = right && so_far == before;
          for (const std::byte byte : bytes)
            right = right && byte == byte_at(from, stretch.block, stretch.offset + so_far++);
        },
        {.bytes_at_once = 1});
    cells.expect(right, "other bytes, or in another order");
    for (int from = 0; from < 4; ++from)
      for (std::size_t i = 0; i < wanted[static_cast<std::size_t>(from)].size(); ++i)
        cells.expect(come[{from, i}] == wanted[static_cast<std::size_t>(from)][i].bytes,
                     fmt::format("{} bytes of stretch {} of rank {}", come[{from, i}], i, from));
  });
}

}  // namespace

void check_copies(Cells& cells) {
  check_losses(cells);
  check_worlds(cells);
  check_what_fits(cells);
  check_bytes(cells);
  check_fetching(cells);
}

}  // namespace lockstep::peer_copies

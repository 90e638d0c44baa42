// all_gather, all_to_all, broadcast, exchange and barrier: every byte arrives where it belongs.
#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/comm/call.h>

#include "reference.h"
#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

// The tensor that rank `from` sends to rank `to`.
at::Tensor message(at::ScalarType dtype, std::int64_t count, int from, int to) {
  return values(dtype, count,
                7 + static_cast<std::uint64_t>(from) * 16 + static_cast<std::uint64_t>(to));
}

std::string label(const char* what, at::ScalarType dtype, std::int64_t count) {
  return fmt::format("{} of {} {}", what, count, name(dtype_of(dtype)));
}

// Rank r contributes counts[r] elements.
void check_all_gather(Suite& suite, at::ScalarType dtype, const std::vector<std::int64_t>& counts) {
  const auto self = static_cast<std::size_t>(suite.rank());
  std::vector<at::Tensor> wanted;
  bool even = true;
  for (std::size_t from = 0; from < counts.size(); ++from) {
    wanted.push_back(message(dtype, counts[from], static_cast<int>(from), 0));
    even = even && counts[from] == counts[0];
  }
  for (const Algorithm algorithm : suite.algorithms(Operation::all_gather)) {
    const at::Tensor input = suite.place(wanted[self]);
    std::vector<at::Tensor> outputs;
    for (const std::int64_t count : counts) outputs.push_back(suite.room(count, dtype));
    suite.group().all_gather(outputs, input, {.algorithm = algorithm}).wait();
    for (std::size_t from = 0; from < counts.size(); ++from)
      suite.expect_same(outputs[from], wanted[from],
                        fmt::format("list, {}, from rank {}", name(algorithm), from));
    if (!even) continue;
    at::Tensor output = suite.room(counts[0] * suite.size(), dtype);
    suite.group().all_gather(output, input, {.algorithm = algorithm}).wait();
    suite.expect_same(output, at::cat(wanted), name(algorithm));
  }
}

// Rank `from` sends count(from, to) elements to rank `to`.
template <typename Count>
void check_all_to_all(Suite& suite, at::ScalarType dtype, Count count) {
  const int self = suite.rank();
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> wanted;
  bool even = true;
  for (int peer = 0; peer < suite.size(); ++peer) {
    inputs.push_back(suite.place(message(dtype, count(self, peer), self, peer)));
    wanted.push_back(message(dtype, count(peer, self), peer, self));
    outputs.push_back(suite.room(count(peer, self), dtype));
    for (int to = 0; to < suite.size(); ++to) even = even && count(peer, to) == count(0, 0);
  }
  suite.group().all_to_all(outputs, inputs).wait();
  for (int peer = 0; peer < suite.size(); ++peer)
    suite.expect_same(outputs[static_cast<std::size_t>(peer)],
                      wanted[static_cast<std::size_t>(peer)],
                      fmt::format("list, from rank {}", peer));
  if (!even) return;
  at::Tensor output = suite.room(count(0, 0) * suite.size(), dtype);
  suite.group().all_to_all(output, at::cat(inputs)).wait();
  suite.expect_same(output, at::cat(wanted), "whole");
}

void check_broadcast(Suite& suite, at::ScalarType dtype, std::int64_t count) {
  for (const Algorithm algorithm : suite.algorithms(Operation::broadcast)) {
    for (int root = 0; root < suite.size(); ++root) {
      if (count == kLarge && root > 1) continue;
      const at::Tensor wanted = message(dtype, count, root, 1);
      at::Tensor tensor = suite.rank() == root ? suite.place(wanted) : suite.room(count, dtype);
      suite.group().broadcast(tensor, root, {.algorithm = algorithm}).wait();
      suite.expect_same(tensor, wanted, fmt::format("{} from root {}", name(algorithm), root));
    }
  }
}

void check_broadcast_of_lists(Suite& suite) {
  const int root = suite.size() - 1;
  const std::vector<std::int64_t> counts = {5, 0, 100'003, 1, 0};
  for (const Algorithm algorithm : suite.algorithms(Operation::broadcast)) {
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < counts.size(); ++i)
      tensors.push_back(suite.rank() == root
                            ? suite.place(message(at::kFloat, counts[i], root, static_cast<int>(i)))
                            : suite.room(counts[i], at::kFloat));
    suite.group().broadcast(tensors, root, {.algorithm = algorithm}).wait();
    for (std::size_t i = 0; i < counts.size(); ++i)
      suite.expect_same(tensors[i], message(at::kFloat, counts[i], root, static_cast<int>(i)),
                        fmt::format("{}, tensor {}", name(algorithm), i));
  }
}

// A model that uses a weight in two places has it in its list of parameters twice.
void check_broadcast_of_shared_weights(Suite& suite) {
  const at::Tensor wanted = message(at::kFloat, 1000, 0, 0);
  const at::Tensor tensor = suite.rank() == 0 ? suite.place(wanted) : suite.room(1000, at::kFloat);
  suite.group().broadcast({tensor, tensor}, 0).wait();
  suite.expect_same(tensor, wanted, "one tensor twice");
}

// No rank may leave a barrier before the last one has entered it. All ranks of a test share the
// host's clock.
void check_barrier(Suite& suite) {
  for (int late = 0; late < suite.size(); ++late) {
    if (suite.rank() == late) std::this_thread::sleep_for(milliseconds(20));
    const auto now = [] {
      return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    const std::int64_t came = now();
    suite.group().barrier().wait();
    const std::int64_t left = now();
    at::Tensor all = suite.room(suite.size(), at::kLong);
    suite.group().all_gather(all, suite.place(at::full({1}, came, at::kLong))).wait_on_host();
    const auto last = all.max().item<std::int64_t>();
    suite.expect(left >= last, fmt::format("left {} ns before the last rank came", last - left));
  }
}

}  // namespace

void check_movement(Suite& suite) {
  const auto n = static_cast<std::size_t>(suite.size());
  std::vector<std::int64_t> uneven;
  for (std::size_t rank = 0; rank < n; ++rank)
    uneven.push_back(rank == 1 ? 0 : 3 + static_cast<std::int64_t>(rank) * 7001);
  for (const at::ScalarType dtype : kDTypes) {
    std::vector<std::int64_t> sizes(std::begin(kSizes), std::end(kSizes));
    // The bytes of all dtypes move alike, so two widths are enough for the long messages.
    if (dtype == at::kFloat || dtype == at::kByte) sizes.push_back(kLarge);
    for (const std::int64_t count : sizes) {
      suite.cell(label("all_gather", dtype, count),
                 [&] { check_all_gather(suite, dtype, std::vector<std::int64_t>(n, count)); });
      suite.cell(label("all_to_all", dtype, count),
                 [&] { check_all_to_all(suite, dtype, [count](int, int) { return count; }); });
      if (count != 8191)
        suite.cell(label("broadcast", dtype, count), [&] { check_broadcast(suite, dtype, count); });
    }
    suite.cell(label("uneven all_gather", dtype, uneven.back()),
               [&] { check_all_gather(suite, dtype, uneven); });
    suite.cell(label("uneven all_to_all", dtype, 1001), [&] {
      check_all_to_all(suite, dtype, [](int from, int to) {
        return std::int64_t{(from + to) % 3 == 0 ? 0 : from * 1001 + to * 3011 + 1};
      });
    });
  }
  suite.cell("uneven all_gather, long", [&] {
    std::vector<std::int64_t> counts(n, 1);
    counts.back() = 2 * kLarge;
    check_all_gather(suite, at::kFloat, counts);
  });
  suite.cell("all_to_all where only rank 0 has something", [&] {
    check_all_to_all(suite, at::kFloat,
                     [](int from, int) { return std::int64_t{from == 0 ? 1000 : 0}; });
  });
  suite.cell("broadcast of a list", [&] { check_broadcast_of_lists(suite); });
  suite.cell("broadcast of shared weights", [&] { check_broadcast_of_shared_weights(suite); });
  suite.cell("barrier", [&] { check_barrier(suite); });
}

namespace {

// A ring: every rank sends to the next and receives from the one before, `messages` times.
void check_ring(Suite& suite, std::int64_t count, int messages, int direction) {
  const int n = suite.size();
  const int next = (suite.rank() + n + direction) % n;
  const int previous = (suite.rank() + n - direction) % n;
  std::vector<Transfer> transfers;
  std::vector<at::Tensor> arrived;
  for (int i = 0; i < messages; ++i) {
    arrived.push_back(suite.room(count + i, at::kFloat));
    transfers.push_back(receive_from(previous, arrived.back()));
    transfers.push_back(
        send_to(next, suite.place(message(at::kFloat, count + i, suite.rank(), i))));
  }
  suite.group().exchange(transfers).wait();
  for (int i = 0; i < messages; ++i)
    suite.expect_same(arrived[static_cast<std::size_t>(i)],
                      message(at::kFloat, count + i, previous, i), fmt::format("message {}", i));
}

// Every rank exchanges with every other one in both directions at once, with messages of several
// lengths and dtypes.
void check_everyone(Suite& suite) {
  const at::ScalarType dtypes[] = {at::kFloat, at::kByte, at::kDouble, at::kBFloat16};
  const auto count = [](int from, int to, int i) {
    return std::int64_t{(from * 3 + to * 5 + i) % 4 == 0 ? 0 : from * 20'001 + to * 1003 + i};
  };
  std::vector<Transfer> transfers;
  std::vector<std::function<void()>> checks;
  for (int peer = 0; peer < suite.size(); ++peer) {
    if (peer == suite.rank()) continue;
    for (int i = 0; i < 4; ++i) {
      const at::ScalarType dtype = dtypes[i];
      transfers.push_back(send_to(
          peer, suite.place(message(dtype, count(suite.rank(), peer, i), suite.rank(), peer + i))));
      at::Tensor room = suite.room(count(peer, suite.rank(), i), dtype);
      transfers.push_back(receive_from(peer, room));
      checks.push_back([&suite, room, peer, i, dtype, count] {
        suite.expect_same(room,
                          message(dtype, count(peer, suite.rank(), i), peer, suite.rank() + i),
                          fmt::format("message {} from rank {}", i, peer));
      });
    }
  }
  suite.group().exchange(transfers).wait();
  for (const auto& check : checks) check();
}

}  // namespace

void check_exchange(Suite& suite) {
  suite.cell("exchange of nothing", [&] { suite.group().exchange({}).wait(); });
  if (suite.size() == 1) return;
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{501'001}}) {
    for (const int direction : {1, -1})
      for (const int messages : {1, 3})
        suite.cell(fmt::format("exchange around the ring, {} messages of {}", messages, count),
                   [&] { check_ring(suite, count, messages, direction); });
  }
  suite.cell("exchange of everyone with everyone", [&] { check_everyone(suite); });
  suite.cell("exchange between two ranks only, while the others go on", [&] {
    for (int round = 0; round < 20; ++round) {
      at::Tensor room = suite.room(100, at::kLong);
      if (suite.rank() == 0)
        suite.group().exchange({send_to(1, suite.place(values(at::kLong, 100, 9)))}).wait();
      if (suite.rank() == 1) {
        suite.group().exchange({receive_from(0, room)}).wait();
        suite.expect_same(room, values(at::kLong, 100, 9), "message");
      }
    }
    suite.group().barrier().wait();
  });
  suite.cell("exchanges between collectives, several in flight", [&] {
    const int n = suite.size();
    std::vector<Work> works;
    std::vector<at::Tensor> rooms;
    for (int round = 0; round < 5; ++round) {
      const int previous = (suite.rank() + n - 1) % n;
      rooms.push_back(suite.room(1000 + round, at::kFloat));
      works.push_back(suite.group().exchange(
          {send_to((suite.rank() + 1) % n,
                   suite.place(message(at::kFloat, 1000 + round, suite.rank(), round))),
           receive_from(previous, rooms.back())}));
      works.push_back(suite.group().barrier());
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
    for (int round = 0; round < 5; ++round)
      suite.expect_same(rooms[static_cast<std::size_t>(round)],
                        message(at::kFloat, 1000 + round, (suite.rank() + n - 1) % n, round),
                        fmt::format("round {}", round));
  });
}

}  // namespace lockstep::comm::conformance

// How calls are launched and waited for, and the memory that they work on.
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

#include "reference.h"
#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

std::uint64_t seed_of(int rank, int call) {
  return 5000 + static_cast<std::uint64_t>(rank) * 64 + static_cast<std::uint64_t>(call);
}

at::Tensor sum_of_all(Suite& suite, std::int64_t count, int call) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < suite.size(); ++rank)
    inputs.push_back(values(at::kLong, count, seed_of(rank, call)));
  return canonical(inputs, ReduceOp::sum);
}

enum class Order { forward, backward, last_only };

// Starts several calls and waits for them in some order.
void check_in_flight(Suite& suite, Order order, Launch first, Launch second) {
  constexpr int kCalls = 12;
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int call = 0; call < kCalls; ++call) {
    tensors.push_back(suite.place(values(at::kLong, 1 + call * 997, seed_of(suite.rank(), call))));
    works.push_back(suite.group().all_reduce(tensors.back(), ReduceOp::sum,
                                             {.launch = call % 2 == 0 ? first : second}));
  }
  if (order == Order::backward) std::reverse(works.begin(), works.end());
  if (order == Order::last_only) works.erase(works.begin(), works.end() - 1);
  for (Work& work : works) {
    work.wait();
    work.wait_on_host();
    suite.expect(work.done(), "done() is false after waiting");
  }
  for (int call = 0; call < kCalls; ++call)
    suite.expect_same(tensors[static_cast<std::size_t>(call)],
                      sum_of_all(suite, 1 + call * 997, call), fmt::format("call {}", call));
}

}  // namespace

void check_launches(Suite& suite) {
  for (const Order order : {Order::forward, Order::backward, Order::last_only}) {
    for (const auto& [first, second] : {std::pair(Launch::in_background, Launch::in_background),
                                        std::pair(Launch::on_wait, Launch::on_wait),
                                        std::pair(Launch::in_background, Launch::on_wait),
                                        std::pair(Launch::on_wait, Launch::in_background)})
      suite.cell("calls in flight", [&] { check_in_flight(suite, order, first, second); });
  }
  suite.cell("a call in the background needs no wait to be made", [&] {
    at::Tensor tensor = suite.place(values(at::kLong, 1000, seed_of(suite.rank(), 40)));
    Work work = suite.group().all_reduce(tensor);
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    while (!work.done() && !deadline.passed()) std::this_thread::yield();
    suite.expect(work.done(), "not done after 20 s without a wait");
    work.wait();
    suite.expect_same(tensor, sum_of_all(suite, 1000, 40), "result");
  });
  suite.cell("a Work that is dropped is done all the same, with its tensors kept alive", [&] {
    suite.group().all_reduce(suite.place(values(at::kLong, 50'000, 1)));
    suite.group().barrier().wait();
  });
  suite.cell("other threads may wait", [&] {
    at::Tensor tensor = suite.place(values(at::kLong, 1000, seed_of(suite.rank(), 41)));
    Work work = suite.group().all_reduce(tensor, ReduceOp::sum, {.launch = Launch::on_wait});
    std::thread one([work]() mutable { work.wait_on_host(); });
    std::thread two([work]() mutable { work.wait_on_host(); });
    one.join();
    two.join();
    work.wait();
    suite.expect_same(tensor, sum_of_all(suite, 1000, 41), "result");
  });
  suite.cell("a waiter that gives up leaves the call alone", [&] {
    // With gloo and mpi, a waiter's deadline ends the call.
    if (suite.size() == 1 || !suite.is_ours()) return;
    for (const Launch launch : {Launch::in_background, Launch::on_wait}) {
      at::Tensor tensor = suite.place(values(at::kLong, 1000, seed_of(suite.rank(), 42)));
      if (suite.rank() != 0) std::this_thread::sleep_for(milliseconds(150));
      Work work = suite.group().all_reduce(tensor, ReduceOp::sum, {.launch = launch});
      if (suite.rank() == 0) {
        try {
          work.wait_on_host(Deadline::after(milliseconds(20)));
          suite.expect(false, "the wait should have ended at its deadline");
        } catch (const CommError& error) {
          suite.expect(error.fault() == Fault::timeout, error.what());
          suite.expect_text(error.what(), "all_reduce");
        }
      }
      work.wait();
      suite.expect_same(tensor, sum_of_all(suite, 1000, 42), "result");
    }
  });
  suite.cell("a timeout of one call's own", [&] {
    at::Tensor tensor = suite.place(values(at::kLong, 10, seed_of(suite.rank(), 43)));
    suite.group().all_reduce(tensor, ReduceOp::sum, {.timeout = milliseconds(20'000)}).wait();
    suite.expect_same(tensor, sum_of_all(suite, 10, 43), "result");
  });
}

void check_memory(Suite& suite) {
  const auto own = static_cast<std::size_t>(suite.rank());
  for (const bool everyone : {true, false}) {
    for (const std::int64_t count : {0, 1, 2000, 100'003}) {
      suite.cell(fmt::format("calls on {} of allocated memory, on {}", count,
                             everyone ? "every rank" : "some ranks"),
                 [&] {
                   // With NCCL, either all ranks of a call have their tensors on GPUs or none has.
                   if (!everyone && !suite.group().lane().empty()) return;
                   const bool here = everyone || suite.rank() % 2 == 0;
                   const auto make = [&](std::int64_t elements) {
                     return here ? suite.group().allocate({elements}, at::kFloat)
                                 : suite.room(elements, at::kFloat);
                   };
                   std::vector<at::Tensor> inputs;
                   for (int rank = 0; rank < suite.size(); ++rank)
                     inputs.push_back(values(at::kFloat, count * suite.size(), seed_of(rank, 50)));
                   const at::Tensor summed = canonical(inputs, ReduceOp::sum);
                   const bool exact = suite.group().canonical_order();
                   const auto same = [&](const at::Tensor& got, const at::Tensor& wanted,
                                         const char* what) {
                     if (exact) return suite.expect_same(got, wanted, what);
                     suite.expect(at::allclose(got.to(at::kCPU), wanted, 1e-4, 1e-4), what);
                   };
                   at::Tensor whole = make(count * suite.size());
                   at::Tensor part = make(count);
                   suite.expect(whole.numel() == count * suite.size() && whole.is_contiguous(),
                                "its shape");
                   for (int round = 0; round < 3; ++round) {
                     whole.copy_(inputs[own]);
                     suite.group().all_reduce(whole).wait();
                     same(whole, summed, "all_reduce");
                     whole.copy_(inputs[own]);
                     suite.group().reduce_scatter(part, whole).wait();
                     same(part, summed.narrow(0, suite.rank() * count, count), "reduce_scatter");
                     suite.group().all_gather(whole, part).wait();
                     same(whole, summed, "all_gather");
                     suite.group().all_reduce(whole.narrow(0, 0, count), ReduceOp::max).wait();
                     same(whole, summed, "all_reduce of a slice");
                     suite.group().broadcast(whole, suite.size() - 1).wait();
                     same(whole, summed, "broadcast");
                   }
                 });
    }
  }
  suite.cell("allocated memory that comes and goes", [&] {
    for (int round = 0; round < 20; ++round) {
      at::Tensor tensor = suite.group().allocate({3, 4000}, at::kInt);
      tensor.fill_(suite.rank() + round);
      suite.group().all_reduce(tensor, ReduceOp::max).wait();
      suite.expect(tensor.eq(suite.size() - 1 + round).all().item<bool>(), "result");
    }
  });
  if (!suite.device().is_cpu()) return;
  suite.cell("in place: the input is a part of the output, the output of the input", [&] {
    const std::int64_t count = 50'001;
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < suite.size(); ++rank)
      parts.push_back(values(at::kInt, count, seed_of(rank, 60)));
    at::Tensor whole = at::zeros({count * suite.size()}, at::kInt);
    at::Tensor mine = whole.narrow(0, suite.rank() * count, count);
    mine.copy_(parts[own]);
    suite.group().all_gather(whole, mine).wait();
    suite.expect_same(whole, at::cat(parts), "all_gather");
    suite.group().reduce_scatter(mine, whole, ReduceOp::max).wait();
    suite.expect_same(mine.clone(), parts[own], "reduce_scatter");
  });
}

}  // namespace lockstep::comm::conformance

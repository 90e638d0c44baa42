// A caller's mistakes are reported before anything is sent, so the other ranks notice nothing.
#include <ATen/ATen.h>

#include <lockstep/base/error.h>

#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

struct Mistake {
  std::string what;
  std::string says;
  std::function<void(Communicator&)> make;
};

std::vector<Mistake> mistakes(Suite& suite) {
  const int n = suite.size();
  const auto good = [suite](std::int64_t count) { return suite.room(count, at::kFloat); };
  const at::Tensor strided = suite.room(12, at::kFloat).view({3, 4}).t();
  const at::Tensor gappy = suite.room(12, at::kFloat).slice(0, 0, 12, 2);
  const at::Tensor elsewhere = at::empty({4}, at::TensorOptions().device(at::kMeta));
  const at::Tensor sparse = at::eye(4).to_sparse();
  const at::Tensor shorts =
      at::ones({4}, at::TensorOptions().dtype(at::kShort).device(suite.device()));
  const at::Tensor complex =
      at::ones({4}, at::TensorOptions().dtype(at::kComplexFloat).device(suite.device()));
  const auto ones = [suite](std::int64_t count, at::ScalarType dtype) {
    return suite.room(count, dtype);
  };
  const auto some = [good](int number) {
    return std::vector<at::Tensor>(static_cast<std::size_t>(number), good(2));
  };

  std::vector<Mistake> all = {
      {"undefined", "undefined", [](Communicator& g) { g.all_reduce(at::Tensor()); }},
      {"transposed", "contiguous", [=](Communicator& g) { g.all_reduce(strided); }},
      {"with gaps", "contiguous", [=](Communicator& g) { g.broadcast(gappy, 0); }},
      {"sparse", "sparse", [=](Communicator& g) { g.all_reduce(sparse); }},
      {"wrong device", "meta", [=](Communicator& g) { g.all_reduce(elsewhere); }},
      {"int16", "Short", [=](Communicator& g) { g.all_reduce(shorts); }},
      {"complex", "ComplexFloat", [=](Communicator& g) { g.broadcast(complex, 0); }},
      {"empty list", "empty", [](Communicator& g) { g.all_reduce(std::vector<at::Tensor>{}); }},
      {"empty list to broadcast", "empty",
       [](Communicator& g) { g.broadcast(std::vector<at::Tensor>{}, 0); }},
      {"two dtypes", "dtype",
       [=](Communicator& g) {
         g.all_reduce(std::vector<at::Tensor>{ones(1, at::kFloat), ones(1, at::kInt)});
       }},
      {"two devices", "meta",
       [=](Communicator& g) {
         g.all_reduce(std::vector<at::Tensor>{good(4), elsewhere});
       }},
      {"mean of integers", "mean",
       [=](Communicator& g) { g.all_reduce(ones(1, at::kLong), ReduceOp::mean); }},
      {"mean of booleans", "mean",
       [=](Communicator& g) {
         g.reduce_scatter(ones(1, at::kBool), ones(n, at::kBool), ReduceOp::mean);
       }},
      {"divisor of a sum", "for means",
       [=](Communicator& g) {
         g.all_reduce(good(1), ReduceOp::sum, {.divisor = at::ones({1}, at::kDouble)});
       }},
      {"divisor of another dtype", "one float64",
       [=](Communicator& g) { g.all_reduce(good(1), ReduceOp::mean, {.divisor = at::ones({1})}); }},
      {"two divisors", "one float64",
       [=](Communicator& g) {
         g.all_reduce(good(1), ReduceOp::mean, {.divisor = at::ones({2}, at::kDouble)});
       }},
      {"root too large", fmt::format("root {}", n),
       [=](Communicator& g) { g.broadcast(good(1), n); }},
      {"root below zero", "root -1", [=](Communicator& g) { g.broadcast(good(1), -1); }},
      {"all_gather: output too short", "all_gather",
       [=](Communicator& g) { g.all_gather(good(2 * n + 1), good(2)); }},
      {"all_gather: two dtypes", "dtype",
       [=](Communicator& g) { g.all_gather(ones(2 * n, at::kInt), good(2)); }},
      {"all_gather: output not contiguous", "contiguous",
       [=](Communicator& g) { g.all_gather(gappy, good(6)); }},
      {"all_gather: too few outputs", fmt::format("{} tensors", n + 1),
       [=](Communicator& g) { g.all_gather(some(n + 1), good(2)); }},
      {"all_gather: own output of another length", "outputs",
       [=](Communicator& g) { g.all_gather(some(n), good(3)); }},
      {"reduce_scatter: input too short", "reduce_scatter",
       [=](Communicator& g) { g.reduce_scatter(good(2), good(2 * n + 1)); }},
      {"reduce_scatter: too many inputs", fmt::format("{} tensors", n + 1),
       [=](Communicator& g) { g.reduce_scatter(good(2), some(n + 1)); }},
      {"reduce_scatter: own input of another length", "inputs",
       [=](Communicator& g) { g.reduce_scatter(good(3), some(n)); }},
      {"all_to_all: lengths differ", "all_to_all",
       [=](Communicator& g) { g.all_to_all(good(n), good(2 * n)); }},
      {"all_to_all: too many", fmt::format("{} tensors", n + 1),
       [=](Communicator& g) { g.all_to_all(some(n + 1), some(n)); }},
      {"all_to_all: what stays differs", "inputs",
       [=](Communicator& g) {
         auto inputs = some(n);
         inputs[static_cast<std::size_t>(g.rank())] = good(3);
         g.all_to_all(some(n), inputs);
       }},
      {"all_reduce: one tensor twice", "tensor 0 and tensor 1 overlap",
       [=](Communicator& g) { g.all_reduce(some(2)); }},
      {"broadcast: one tensor twice", "tensor 0 and tensor 2 overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(4);
         g.broadcast({one.narrow(0, 0, 2), good(1), one.narrow(0, 1, 2)}, 0);
       }},
      {"all_to_all in place", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n);
         g.all_to_all(one, one);
       }},
      {"all_to_all: output over a part of the input", "output 0 and input 0 overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n + 1);
         g.all_to_all(one.narrow(0, 0, 2 * n), one.narrow(0, 1, 2 * n));
       }},
      {"all_to_all: lists that share memory", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(4 * n - 1);
         std::vector<at::Tensor> outputs;
         std::vector<at::Tensor> inputs;
         for (int rank = 0; rank < n; ++rank) {
           outputs.push_back(one.narrow(0, 2 * rank, 2));
           inputs.push_back(one.narrow(0, 2 * n - 1 + 2 * rank, 2));
         }
         g.all_to_all(outputs, inputs);
       }},
      {"all_gather: input across parts", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n + 1);
         g.all_gather(one.narrow(0, 0, 2 * n), one.narrow(0, 2 * g.rank() + 1, 2));
       }},
      {"all_gather: input across two outputs", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n + 1);
         std::vector<at::Tensor> outputs;
         for (int rank = 0; rank < n; ++rank) outputs.push_back(one.narrow(0, 2 * rank, 2));
         g.all_gather(outputs, one.narrow(0, 2 * g.rank() + 1, 2));
       }},
      {"reduce_scatter: output across parts", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n + 1);
         g.reduce_scatter(one.narrow(0, 2 * g.rank() + 1, 2), one.narrow(0, 0, 2 * n));
       }},
      {"reduce_scatter: output across two inputs", "overlap",
       [=](Communicator& g) {
         const at::Tensor one = good(2 * n + 1);
         std::vector<at::Tensor> inputs;
         for (int rank = 0; rank < n; ++rank) inputs.push_back(one.narrow(0, 2 * rank, 2));
         g.reduce_scatter(one.narrow(0, 2 * g.rank() + 1, 2), inputs);
       }},
      {"exchange with itself", "another rank",
       [=](Communicator& g) { g.exchange({send_to(g.rank(), good(1))}); }},
      {"exchange with nobody", fmt::format("{} is not", n),
       [=](Communicator& g) { g.exchange({receive_from(n, good(1))}); }},
      {"split without a name", "name", [](Communicator& g) { g.split(0, 0, ""); }},
      {"a negative size", "negative", [](Communicator& g) { g.allocate({-1}, at::kFloat); }},
      {"a negative size after an empty one", "negative",
       [](Communicator& g) {
         g.allocate({0, -1}, at::kFloat);
       }},
      {"more elements than can be counted", "counted",
       [](Communicator& g) {
         g.allocate({1LL << 32, 1LL << 32}, at::kByte);
       }},
      {"more bytes than can be counted", "[4611686018427387904] of Float",
       [](Communicator& g) { g.allocate({1LL << 62}, at::kFloat); }},
      {"allocate int16", "Short", [](Communicator& g) { g.allocate({1}, at::kShort); }},
  };
  if (n > 1) {
    all.push_back({"all_to_all: does not divide", "divide",
                   [=](Communicator& g) { g.all_to_all(good(n + 1), good(n + 1)); }});
    all.push_back({"all_gather: another rank's place", "overlap", [=](Communicator& g) {
                     const at::Tensor one = good(2 * n);
                     g.all_gather(one, one.narrow(0, 2 * ((g.rank() + 1) % n), 2));
                   }});
    all.push_back({"all_gather: one output for all", "output 0 and output 1 overlap",
                   [=](Communicator& g) { g.all_gather(some(n), good(2)); }});
    all.push_back({"reduce_scatter: another rank's input", "overlap", [=](Communicator& g) {
                     std::vector<at::Tensor> inputs;
                     for (int rank = 0; rank < n; ++rank) inputs.push_back(good(2));
                     const auto other = static_cast<std::size_t>((g.rank() + 1) % n);
                     g.reduce_scatter(inputs[other], inputs);
                   }});
    all.push_back({"exchange: received over what is sent", "receive 0 and send 0 overlap",
                   [=](Communicator& g) {
                     const int peer = (g.rank() + 1) % n;
                     const at::Tensor one = good(3);
                     g.exchange({send_to(peer, one.narrow(0, 0, 2)),
                                 receive_from(peer, one.narrow(0, 1, 2))});
                   }});
    all.push_back({"exchange: not contiguous", "contiguous", [=](Communicator& g) {
                     const int peer = (g.rank() + 1) % n;
                     g.exchange({send_to(peer, good(1)), receive_from(peer, gappy)});
                   }});
    all.push_back({"exchange: undefined", "undefined", [=](Communicator& g) {
                     g.exchange({send_to((g.rank() + 1) % n, at::Tensor())});
                   }});
  }
  if (suite.group().canonical_order()) {
    all.push_back({"an algorithm that the operation lacks", "ring",
                   [](Communicator& g) { g.barrier({.algorithm = Algorithm::ring}); }});
    all.push_back({"an algorithm that exchange lacks", "tree", [=](Communicator& g) {
                     const int peer = (g.rank() + 1) % n;
                     std::vector<Transfer> transfers;
                     if (n > 1) transfers.push_back(send_to(peer, good(1)));
                     g.exchange(transfers, {.algorithm = Algorithm::tree});
                   }});
  }
  return all;
}

}  // namespace

// Each rank makes every mistake in turn, while the others do nothing.
void check_bad_arguments(Suite& suite) {
  const auto all = mistakes(suite);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Mistake& mistake = all[i];
    suite.cell("bad argument: " + mistake.what, [&] {
      if (suite.rank() == static_cast<int>(i) % suite.size()) {
        try {
          mistake.make(suite.group());
          suite.expect(false, "nothing was thrown");
        } catch (const UsageError& error) {
          suite.expect_text(error.what(), mistake.says);
        } catch (const std::exception& error) {
          suite.expect(false, fmt::format("thrown as another error: {}", error.what()));
        }
      }
      at::Tensor tensor = suite.room(3, at::kFloat);
      suite.group().all_reduce(tensor).wait();
      suite.expect(tensor.eq(suite.size()).all().item<bool>(), "the next call's result");
    });
  }
  suite.cell("exchange after mistakes", [&] {
    if (suite.size() == 1) return;
    const int n = suite.size();
    at::Tensor room = suite.room(10, at::kFloat);
    suite.group()
        .exchange({send_to((suite.rank() + 1) % n, suite.room(10, at::kFloat)),
                   receive_from((suite.rank() + n - 1) % n, room)})
        .wait();
  });
}

}  // namespace lockstep::comm::conformance

#include <lockstep/base/error.h>
#include <lockstep/nn/context_parallel/context_parallel_attention.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

void check_shapes(Cells& cells) {
  const auto attend = [&](at::IntArrayRef q, at::IntArrayRef k, ContextParallelOptions options) {
    return [&cells, q = q.vec(), k = k.vec(), options] {
      context_parallel_attention(at::ones(q), at::ones(k), at::ones(k), cells.group(), options);
    };
  };
  const int ranks = cells.num_ranks();
  cells.cell("heads that do not divide by the ranks", [&] {
    cells.expect_usage_error(
        attend({1, 5, 4, 2}, {1, 5, 4, 2}, {.algorithm = ContextAlgorithm::all_to_all}),
        fmt::format("each of {} ranks as many heads, and 5", ranks));
    cells.expect_usage_error(
        [&] {
          ContextParallelAttention(
              10, 5, cells.group(),
              ContextParallelAttentionOptions{.algorithm = ContextAlgorithm::all_to_all});
        },
        "and 5 do not divide");
  });
  cells.cell("parts that are no parts of a zigzag", [&] {
    cells.expect_usage_error(attend({1, 4, 5, 2}, {1, 4, 5, 2}, {}),
                             fmt::format("Pad it to {}", 6 * ranks));
  });
  cells.cell("queries and keys of other positions", [&] {
    cells.expect_usage_error(attend({1, 4, 4, 2}, {1, 4, 6, 2}, {.causal = false}),
                             "4 queries over 6 keys");
  });
  cells.cell("heads that cannot share keys", [&] {
    cells.expect_usage_error(attend({1, 4, 4, 2}, {1, 3, 4, 2}, {}), "4 heads of queries over 3");
    cells.expect_usage_error([&] { ContextParallelAttention(12, 5, cells.group()); },
                             "12 does not divide into 5 heads");
    cells.expect_usage_error(
        [&] {
          ContextParallelAttention(12, 4, cells.group(),
                                   ContextParallelAttentionOptions{.num_kv_heads = 3});
        },
        "4 heads cannot share 3");
  });
  cells.cell("no group", [&] {
    const auto x = at::ones({1, 1, 2, 2});
    cells.expect_usage_error([&] { context_parallel_attention(x, x, x, nullptr); }, "no group");
  });
  cells.cell("another width", [&] {
    ContextParallelAttention module(12, 4, cells.group());
    cells.expect_usage_error([&] { module->forward(at::ones({1, 4, 6})); }, "12");
  });
  cells.cell("groups that do not divide the world", [&] {
    cells.expect_usage_error([&] { init_context_parallel_group(cells.group(), ranks + 1); },
                             fmt::format("{} ranks cannot be split", ranks));
    cells.expect_usage_error([&] { init_context_parallel_group(cells.group(), 0); }, "groups of 0");
  });
  cells.cell("gradients of gradients", [&] {
    for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all}) {
      const auto x = at::randn({1, 12, 4, 2}).requires_grad_();
      const auto y = context_parallel_attention(x, x, x, cells.group(), {.algorithm = algorithm});
      cells.expect_usage_error(
          [&] { torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true); },
          "no second derivative");
    }
  });
}

// Every rank gets an error with its own arguments.
void check_disagreement(Cells& cells) {
  struct Way {
    std::string name;
    AttentionCase mine;  // rank 0's case
    ContextParallelOptions options;
  };
  const AttentionCase usual{.heads = 12, .kv_heads = 12, .length = 4};
  for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all}) {
    const ContextParallelOptions options{.algorithm = algorithm};
    auto longer = usual, wider = usual, of_more_samples = usual;
    longer.length = 6;
    wider.heads = 24;
    of_more_samples.batch = 2;
    auto full = options, scaled = options, contiguous = options;
    full.causal = false;
    scaled.scale = 2.0;
    contiguous.split = SplitKind::contiguous;
    for (const auto& way : std::vector<Way>{{"lengths", longer, options},
                                            {"heads of queries", wider, options},
                                            {"samples", of_more_samples, options},
                                            {"masks", usual, full},
                                            {"scales", usual, scaled},
                                            {"splits", usual, contiguous}})
      cells.cell(fmt::format("ranks with other {}, {}", way.name, name(algorithm)), [&] {
        const auto group = cells.group()->split(0, cells.rank(), "mistaken");
        if (group->size() == 1) return;
        const bool other = cells.rank() == 0;
        const auto& shape = other ? way.mine : usual;
        const auto draw = [&](std::int64_t heads) {
          return at::randn({shape.batch, heads, shape.length, shape.head_dim});
        };
        const auto q = draw(shape.heads), k = draw(shape.kv_heads);
        try {
          context_parallel_attention(q, k, k, group, other ? way.options : options);
        } catch (const CommError& error) {
          const std::string text = error.what();
          cells.expect(error.fault() == Fault::mismatch, "another fault: " + text);
          cells.expect(text.find("must pass the same shapes") != std::string::npos &&
                           text.find(fmt::format("q [{}, {}, {}, 8]", shape.batch, shape.heads,
                                                 shape.length)) != std::string::npos,
                       "the error says " + text);
          return;
        }
        cells.expect(false, "no CommError");
      });
  }
}

}  // namespace

void check_context_mistakes(Cells& cells) {
  if (cells.num_ranks() == 1) return;
  check_shapes(cells);
  check_disagreement(cells);
}

}  // namespace lockstep::nn

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/optim/clip.h>
#include <lockstep/parallel/shard/gradient_norm.h>

#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;
// where the next rank's piece begins: one number fewer than ranks
using Cuts = std::vector<std::int64_t>;

struct CutGradient {
  std::int64_t size;
  Cuts cuts;
};

// Compares the norm of gradients that are cut this way with that of one rank that has all of them.
void expect_exact(Cells& cells, const std::vector<CutGradient>& gradients,
                  at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(3);
  std::vector<optim::NamedParameter> whole;
  std::vector<GradientPiece> pieces;
  for (const auto& [size, cuts] : gradients) {
    // Values have many magnitudes, so that another order of addition shows.
    const at::Tensor values = (at::randn({size}, at::kDouble) * at::randn({size}).exp()).to(dtype);
    const std::string name = std::to_string(whole.size());
    whole.push_back({name, at::zeros({size}, dtype).requires_grad_()});
    whole.back().tensor.mutable_grad() = values;
    GradientPiece& piece = pieces.emplace_back();
    std::int64_t begin = 0;
    for (int rank = 0; rank < cells.num_ranks(); ++rank) {
      const std::int64_t end =
          rank + 1 == cells.num_ranks() ? size : cuts[static_cast<std::size_t>(rank)];
      piece.ranges.push_back({begin, end});
      begin = end;
    }
    const mesh::Interval mine = piece.ranges[static_cast<std::size_t>(cells.rank())];
    piece.values = values.slice(0, mine.begin, mine.end).clone();
  }
  const auto wanted = optim::gradient_norm(whole).item<double>();
  const auto got = gradient_sum_of_squares(pieces, *cells.group()).sqrt().item<double>();
  cells.expect(got == wanted, fmt::format("the norm is {:.17g}, one rank's {:.17g}", got, wanted));
  if (!at::hasCUDA()) return;
  const c10::Device gpu(at::kCUDA, 0);
  for (GradientPiece& piece : pieces) piece.values = piece.values.to(gpu);
  const at::Tensor there = gradient_sum_of_squares(pieces, *cells.group(), gpu).sqrt();
  cells.expect(there.is_cuda() && there.item<double>() == wanted,
               fmt::format("the norm on a GPU is {:.17g}, one rank's {:.17g}", there.item<double>(),
                           wanted));
}

}  // namespace

void check_gradient_norm(Cells& cells) {
  const int num_ranks = cells.num_ranks();
  // The cut is the same for every number of ranks; later ranks get the rest.
  const auto cut = [&](std::int64_t size, std::int64_t first, std::int64_t second) {
    return CutGradient{size, num_ranks == 2 ? Cuts{first} : Cuts{first, second}};
  };
  cells.cell("a norm of pieces around the block's size", [&] {
    for (const std::int64_t size : {1, 2, 4095, 4096, 4097, 8191, 8192, 8193, 12'289})
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, size / 2, size - 1, size})
        expect_exact(cells, {cut(size, first, first + (size - first) / 2)});
  });
  cells.cell("a norm of pieces cut beside a block's end", [&] {
    for (const std::int64_t first : {4095, 4096, 4097})
      for (const std::int64_t second : {4097, 8191, 8192, 8193})
        expect_exact(cells, {cut(20'000, first, second)});
  });
  cells.cell("a norm of one block that lies on every rank", [&] {
    expect_exact(cells, {cut(4096, 1000, 1001), cut(300, 299, 299)});
  });
  cells.cell("a norm of many parameters in one exchange", [&] {
    std::vector<CutGradient> all;
    for (std::int64_t number = 0; number < 40; ++number) {
      const std::int64_t size = number * number * 11 % 9001;
      all.push_back(cut(size, size / 3, size / 3 + size / 7));
    }
    expect_exact(cells, all);
  });
  cells.cell("a norm where one rank has everything", [&] {
    expect_exact(cells, {cut(9000, 0, 0), cut(9000, 9000, 9000), cut(9000, 0, 9000)});
  });
  cells.cell("a norm of other dtypes", [&] {
    for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16})
      expect_exact(cells, {cut(10'000, 3000, 3001), cut(5000, 4097, 4098)}, dtype);
  });
  cells.cell("a norm of nothing", [&] {
    expect_exact(cells, {});
    expect_exact(cells, {cut(0, 0, 0)});
  });
  cells.cell("a norm that is not finite on one rank is so on all", [&] {
    GradientPiece piece;
    piece.ranges = {{0, 10}, {10, 20}};
    if (num_ranks == 3) piece.ranges.push_back({20, 20});
    piece.values = at::ones({piece.ranges[static_cast<std::size_t>(cells.rank())].size()});
    if (cells.rank() == 1) piece.values[3] = std::numeric_limits<float>::infinity();
    cells.expect(std::isinf(gradient_sum_of_squares({piece}, *cells.group()).item<double>()),
                 "the norm is finite");
  });
}

}  // namespace lockstep::shard

#include "model_layouts.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

namespace lockstep::parity {

namespace {

using enum nn::ContextAlgorithm;
using enum pipeline::ScheduleKind;
using enum ShardingStrategy;

constexpr auto kSlices = nn::BetweenLayers::by_positions;
constexpr auto kContiguous = nn::SplitKind::contiguous;

std::vector<ModelLayout> pipelines(int num_ranks) {
  return {{.pp = num_ranks, .schedule = gpipe},
          {.pp = num_ranks},
          {.pp = num_ranks, .schedule = interleaved, .chunks = 2},
          {.pp = num_ranks, .schedule = zb_h1},
          {.pp = num_ranks, .schedule = zb_v, .chunks = 2}};
}

std::vector<ModelLayout> joined(std::vector<ModelLayout> first,
                                const std::vector<ModelLayout>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<ModelLayout> everyday_layouts(int num_ranks) {
  switch (num_ranks) {
    case 1: return {{}};
    case 2:
      return joined({{.tp = 2},
                     {.tp = 2, .between = kSlices},
                     {.cp = 2},
                     {.cp = 2, .split = kContiguous},
                     {.cp = 2, .algorithm = all_to_all},
                     {.replicate = 2},
                     {.shard = 2, .strategy = FULL_SHARD}},
                    pipelines(2));
    case 4:
      return joined({{.tp = 4},
                     {.tp = 4, .between = kSlices},
                     {.cp = 4},
                     {.cp = 4, .algorithm = all_to_all},
                     {.cp = 2, .tp = 2},
                     {.cp = 2, .tp = 2, .between = kSlices, .algorithm = all_to_all},
                     {.replicate = 2, .tp = 2, .between = kSlices},
                     {.replicate = 2, .cp = 2},
                     {.pp = 2, .tp = 2, .between = kSlices},
                     {.pp = 2, .cp = 2, .schedule = zb_h1},
                     {.pp = 2, .replicate = 2, .schedule = zb_v, .chunks = 2},
                     {.shard = 2, .tp = 2, .strategy = FULL_SHARD},
                     {.shard = 2, .cp = 2, .strategy = SHARD_GRAD_OP},
                     {.pp = 2, .shard = 2, .strategy = SHARD_OPTIMIZER},
                     {.pp = 2, .shard = 2, .strategy = FULL_SHARD}},
                    pipelines(4));
    // Every combination of three of the five axes, with every schedule and strategy among them.
    case 8:
      return {{.replicate = 2, .cp = 2, .tp = 2, .between = kSlices},
              {.shard = 2, .cp = 2, .tp = 2, .algorithm = all_to_all, .strategy = SHARD_GRAD_OP},
              {.replicate = 2, .shard = 2, .tp = 2, .strategy = HYBRID_SHARD},
              {.replicate = 2, .shard = 2, .cp = 2, .strategy = HYBRID_SHARD},
              {.pp = 2, .cp = 2, .tp = 2, .between = kSlices, .schedule = zb_v, .chunks = 2},
              {.pp = 2, .replicate = 2, .tp = 2, .schedule = gpipe},
              {.pp = 2, .replicate = 2, .cp = 2, .schedule = interleaved, .chunks = 2},
              {.pp = 2,
               .shard = 2,
               .tp = 2,
               .between = kSlices,
               .schedule = zb_h1,
               .strategy = FULL_SHARD},
              {.pp = 2, .shard = 2, .cp = 2, .strategy = SHARD_OPTIMIZER},
              {.pp = 2, .replicate = 2, .shard = 2, .schedule = zb_h1, .strategy = HYBRID_SHARD}};
    default: return {};
  }
}

std::vector<ModelLayout> layouts_besides(int num_ranks) {
  switch (num_ranks) {
    case 2:
      return {{.shard = 2, .strategy = SHARD_OPTIMIZER}, {.shard = 2, .strategy = SHARD_GRAD_OP}};
    case 4:
      return {{.cp = 4, .split = kContiguous},
              {.cp = 2, .tp = 2, .split = kContiguous},
              {.replicate = 2, .shard = 2, .strategy = HYBRID_SHARD},
              {.shard = 2, .cp = 2, .algorithm = all_to_all, .strategy = FULL_SHARD},
              {.replicate = 2, .cp = 2, .strategy = HYBRID_SHARD},
              {.pp = 2, .tp = 2, .schedule = interleaved, .chunks = 2},
              {.pp = 2, .cp = 2, .algorithm = all_to_all, .schedule = gpipe},
              {.pp = 2, .shard = 2, .schedule = zb_h1, .strategy = SHARD_GRAD_OP}};
    case 8:
      return {
          {.replicate = 2, .cp = 2, .tp = 2},
          {.replicate = 2, .cp = 2, .tp = 2, .between = kSlices, .strategy = HYBRID_SHARD},
          {.shard = 2, .cp = 2, .tp = 2, .between = kSlices, .strategy = FULL_SHARD},
          {.pp = 2,
           .cp = 2,
           .tp = 2,
           .algorithm = all_to_all,
           .schedule = interleaved,
           .chunks = 2},
          {.pp = 2, .shard = 2, .tp = 2, .schedule = zb_v, .chunks = 2, .strategy = SHARD_GRAD_OP},
          {.pp = 2, .shard = 2, .cp = 2, .schedule = gpipe, .strategy = FULL_SHARD},
          {.cp = 2, .tp = 4, .between = kSlices},
          {.cp = 4, .tp = 2},
          {.replicate = 2, .tp = 4},
          {.shard = 2, .tp = 4, .between = kSlices, .strategy = FULL_SHARD},
          {.shard = 2, .cp = 4, .algorithm = all_to_all, .strategy = FULL_SHARD},
          {.pp = 2, .tp = 4, .schedule = zb_v, .chunks = 2},
          {.pp = 2, .cp = 4, .schedule = interleaved, .chunks = 2},
          {.pp = 4, .tp = 2, .between = kSlices, .schedule = zb_h1},
          {.pp = 4, .cp = 2, .schedule = zb_v, .chunks = 2},
          {.pp = 4, .replicate = 2, .schedule = interleaved, .chunks = 2},
          {.pp = 4, .shard = 2, .schedule = zb_h1, .strategy = FULL_SHARD}};
    // Every combination of four of the five axes, and combinations of three in which one has four
    // ranks.
    case 16:
      return {
          {.replicate = 2, .shard = 2, .cp = 2, .tp = 2, .strategy = HYBRID_SHARD},
          {.pp = 2, .shard = 2, .cp = 2, .tp = 2, .between = kSlices, .strategy = FULL_SHARD},
          {.pp = 2, .replicate = 2, .cp = 2, .tp = 2, .schedule = zb_v, .chunks = 2},
          {.pp = 2,
           .replicate = 2,
           .shard = 2,
           .tp = 2,
           .between = kSlices,
           .schedule = interleaved,
           .chunks = 2,
           .strategy = HYBRID_SHARD},
          {.pp = 2,
           .replicate = 2,
           .shard = 2,
           .cp = 2,
           .algorithm = all_to_all,
           .schedule = zb_h1,
           .strategy = HYBRID_SHARD},
          {.shard = 2, .cp = 2, .tp = 4, .between = kSlices, .strategy = SHARD_GRAD_OP},
          {.replicate = 2, .cp = 4, .tp = 2},
          {.replicate = 2, .shard = 2, .cp = 4, .algorithm = all_to_all, .strategy = HYBRID_SHARD},
          {.replicate = 2, .shard = 2, .tp = 4, .strategy = HYBRID_SHARD},
          {.pp = 2, .cp = 2, .tp = 4, .between = kSlices, .schedule = zb_h1},
          {.pp = 2, .cp = 4, .tp = 2, .schedule = gpipe},
          {.pp = 2, .shard = 2, .tp = 4, .schedule = zb_v, .chunks = 2, .strategy = FULL_SHARD},
          {.pp = 2, .shard = 2, .cp = 4, .algorithm = all_to_all, .strategy = SHARD_OPTIMIZER},
          {.pp = 4, .cp = 2, .tp = 2, .between = kSlices, .schedule = interleaved, .chunks = 2},
          {.pp = 4, .replicate = 2, .tp = 2, .schedule = zb_v, .chunks = 2},
          {.pp = 4, .shard = 2, .cp = 2, .schedule = zb_h1, .strategy = FULL_SHARD},
          {.pp = 4, .replicate = 2, .shard = 2, .strategy = HYBRID_SHARD},
          {.pp = 4, .tp = 4, .between = kSlices, .schedule = gpipe},
          {.pp = 4, .cp = 4, .schedule = zb_v, .chunks = 2},
          {.cp = 4, .tp = 4, .between = kSlices}};
    default: return {};
  }
}

}  // namespace

int ModelLayout::num_axes() const {
  return static_cast<int>(std::ranges::count_if(std::vector{pp, replicate, shard, cp, tp},
                                                [](int size) { return size > 1; }));
}

std::int64_t ModelLayout::num_layers() const { return std::max(4, pp * chunks); }

std::string ModelLayout::text() const {
  std::string text =
      fmt::format("pp {} replicate {} shard {} cp {} tp {}", pp, replicate, shard, cp, tp);
  if (pp > 1) text += fmt::format(", {}", pipeline::name_of(schedule));
  if (cp > 1) text += fmt::format(", {} {}", mesh::name(algorithm), mesh::name(split));
  if (between == kSlices) text += ", by positions";
  switch (strategy) {
    case NO_SHARD: break;
    case SHARD_OPTIMIZER: text += ", ZeRO-1"; break;
    case SHARD_GRAD_OP: text += ", ZeRO-2"; break;
    case FULL_SHARD: text += ", ZeRO-3"; break;
    case HYBRID_SHARD: text += ", hybrid"; break;
  }
  if (offload) text += ", offloaded";
  return text;
}

std::vector<ModelLayout> layouts_of(int num_ranks, Share share) {
  auto layouts = everyday_layouts(num_ranks);
  return share == Share::everyday ? layouts
                                  : joined(std::move(layouts), layouts_besides(num_ranks));
}

}  // namespace lockstep::parity

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

// Expects that `body` throws an error whose text has one of these parts.
void expect_error(Cells& cells, const std::function<void()>& body,
                  const std::vector<std::string>& parts) {
  std::string text;
  try {
    body();
    return cells.expect(false, "no error");
  } catch (const std::exception& error) {
    text = error.what();
  }
  for (const std::string& part : parts)
    cells.expect(text.find(part) != std::string::npos,
                 fmt::format("the error says '{}', without '{}'", text, part));
}

// Calls have a short deadline; the groups themselves are made with the usual one.
FullyShardedDataParallel impatient(Cells& cells, torch::nn::Module& module,
                                   std::size_t max_live_units = 2) {
  Groups groups = shard_over(cells.group());
  for (const auto& group : {groups.all, groups.gather, groups.reduce})
    group->set_timeout(milliseconds(5'000));
  return FullyShardedDataParallel(module, std::move(groups),
                                  {.max_live_units = max_live_units, .scrub_freed_memory = true});
}

}  // namespace

void check_one_rank_more(Cells& cells) {
  cells.cell("a parameter that one rank alone touches", [&] {
    Chain model(3);
    FullyShardedDataParallel parallel = impatient(cells, *model);
    const auto step = [&] {
      const at::Tensor hidden = model->layer(0).forward(at::ones({2, 5}));
      (cells.rank() == 0 ? model->layer(2).forward(hidden) : hidden).sum().backward();
      adamw(parallel, *model)->step(0.1);
    };
    // The other rank is not in that call; it gets the error about the rank that did not come to its
    // own call.
    if (cells.rank() == 0)
      expect_error(cells, step, {"the unit 'layers.2'", "rank 1"});
    else
      expect_error(cells, step, {"rank 0"});
  });
}

void check_other_units(Cells& cells) {
  cells.cell("ranks that use different units of one size", [&] {
    Chain model(3);
    FullyShardedDataParallel parallel = impatient(cells, *model);
    const auto step = [&] {
      const at::Tensor hidden = model->layer(0).forward(at::ones({2, 5}));
      model->layer(cells.rank() == 1 ? 1 : 2).forward(hidden).sum().backward();
      adamw(parallel, *model)->step(0.1);
    };
    expect_error(cells, step,
                 {cells.rank() == 1 ? "the unit 'layers.1'" : "the unit 'layers.2'", "mismatch",
                  ", unit 'layers.1')", ", unit 'layers.2')", "put the branches into one unit"});
  });
}

void check_other_call(Cells& cells) {
  cells.cell("a rank that is in another call than the gradients'", [&] {
    Chain model(3);
    Groups groups = shard_over(cells.group());
    for (const auto& group : {groups.all, groups.gather, groups.reduce})
      group->set_timeout(milliseconds(5'000));
    FullyShardedDataParallel parallel(*model, std::move(groups), {.cut = Cut::gradients});
    std::string text;
    try {
      if (cells.rank() == 0)
        model->forward(at::ones({2, 5})).sum().backward();
      else
        cells.group()->barrier().wait();
    } catch (const std::exception& error) {
      text = error.what();
    }
    cells.expect(text.find("mismatch") != std::string::npos, "no mismatch: " + text);
    cells.expect(text.find("subject") == std::string::npos, "a number without meaning: " + text);
    if (cells.rank() == 0)
      cells.expect(text.find(", unit 'layers.") != std::string::npos, "no unit's name: " + text);
  });
}

void check_other_pass(Cells& cells) {
  cells.cell("a rank that has one pass more than the others", [&] {
    Chain model(2);
    FullyShardedDataParallel parallel = impatient(cells, *model, 1);
    const auto pass = [&] { model->forward(at::ones({2, 5})).sum().backward(); };
    pass();
    expect_error(cells,
                 [&] {
                   if (cells.rank() == 0) pass();
                   adamw(parallel, *model)->step(0.1);
                   cells.group()->barrier().wait();
                 },
                 {cells.rank() == 0 ? "rank 1" : "rank 0"});
  });
}

}  // namespace lockstep::shard
